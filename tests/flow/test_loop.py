"""The whole loop through the command line, on smollm2 and real vLLM, as small as it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, every_core, run_command, write_jsonl

from paceline.records import read_json, read_jsonl

pytestmark = pytest.mark.engine

MIN_REPLAY_SHARE = 0.98  # of some hundred steps; rules ask 0.99 of a full run
MAX_POSITION_1_DIFFERENCE = 0.02
NUM_FEW = 3
SMOLLM2 = ("--target", "smollm2")
RECIPE = """
family = "eagle3"
seed = 3
[draft]
num_speculative_tokens = 3
draft_vocab_size = 1024
[optim]
lr = 1e-3
num_steps = 3
tokens_per_batch = 256
max_length = 128
"""
QUESTIONS = (
    ("chat", "Say hello to a neighbour who moved in today."),
    ("chat", "What should I bring to a picnic?"),
    ("explain", "Explain why the sky is blue to a child."),
    ("explain", "Explain how bread rises."),
    ("code", "Write a Python function that adds two numbers."),
    ("code", "Write a loop in Python that prints the numbers from 1 to 5."),
)


def measure(draft: object, *words: object) -> Outcome:
    """`paceline eval` under the demo's rules, with short answers."""
    outcome = run_command("eval", draft, *SMOLLM2, "--rules", "demo", *words, timeout_s=240.0)
    outcome.require(0)
    return outcome


def read_answers(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "requests.jsonl") if row["kind"] == "answer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Path:
    rows = [{"prompt": text, "category": category} for category, text in QUESTIONS]
    return write_jsonl(folder / "questions.jsonl", [*rows])


@pytest.fixture(scope="module")
def few_prompts(folder: Path, prompts: Path) -> Path:
    few = [json.loads(line) for line in _lines(prompts)[:NUM_FEW]]
    return write_jsonl(folder / "few.jsonl", few)


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    out = folder / "data"
    words = ("--prompts", "train:8", "--max-tokens", 24, "--out", out, "--data-parallel", 2)
    with every_core():
        outcome = run_command("data", "answer", *words, *SMOLLM2)
    outcome.require(0)
    assert "2 engines" in outcome.out
    assert all((folder / f"data-{n}.engine.log").is_file() for n in range(2))
    assert outcome.out.splitlines()[-1].startswith(f"data: {out}: 8 rows, 0 rejected; ")
    return out


@pytest.fixture(scope="module")
def draft(folder: Path, data: Path) -> Path:
    (folder / "recipe.toml").write_text(RECIPE)
    out = folder / "draft"
    words = (folder / "recipe.toml", *SMOLLM2, "--data", data, "--out", out)
    outcome = run_command("train", *words)
    outcome.require(0)
    assert "training: 3/3" in outcome.out
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "metadata.json",
        "model.safetensors",
        "spec.json",
    ]
    return out


@pytest.fixture(scope="module")
def run(folder: Path, draft: Path, prompts: Path) -> Path:
    out = folder / "run"
    words = ("--baseline", "smollm2-eagle3", "--prompts", prompts, "--max-tokens", 32)
    outcome = measure(draft, *words, "--out", out)
    assert "Trained against served" in outcome.out
    return out


def test_data_is_shown_with_its_mask(data: Path) -> None:
    outcome = run_command("data", "show", data, *SMOLLM2, "--rows", 1)
    outcome.require(0)
    assert "<|im_start|>assistant\n⟦" in outcome.out
    rows = read_jsonl(data / "rows.jsonl")
    assert len(rows) == 8
    assert all(row["loss_spans"][0][1] - row["loss_spans"][0][0] <= 24 for row in rows)


def test_trained_draft_is_valid(draft: Path) -> None:
    outcome = run_command("validate", draft, *SMOLLM2, "--deep", "--json")
    outcome.require(0)
    assert json.loads(outcome.out)["verdict"] in ("pass", "warn")
    assert read_json(draft / "config.json")["draft_vocab_size"] == 1024


def test_every_arm_was_asked_every_prompt(run: Path) -> None:
    result = read_json(run / "result.json")
    assert set(result["arms"]) == {"plain", "baseline", "candidate"}
    asked = {(row["arm"], row["id"]) for row in read_answers(run)}
    assert len(asked) == len(read_answers(run)) == 3 * len(QUESTIONS)
    for arm in result["arms"].values():
        assert arm["failures"] == 0
    assert result["arms"]["baseline"]["tau"]["value"] > 1.4
    assert result["arms"]["candidate"]["memory"]["weights_bytes"] > 0
    assert all(not fidelity["real_fork"] for fidelity in result["fidelity"].values())


def test_score_is_the_same_number(run: Path) -> None:
    written = read_json(run / "result.json")["score"]
    outcome = run_command("score", run, "--json")
    outcome.require(0)
    assert json.loads(outcome.out) == written
    table = run_command("score", run)
    table.require(0)
    assert table.out.startswith(f"Score  {written['value']:.1f}")


def test_report_is_one_page_without_script(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert "<script" not in page.lower()
    (run / "report.html").unlink()
    run_command("report", run).require(0)
    assert (run / "report.html").read_text(encoding="utf-8") == page


def test_trained_acceptance_is_served_acceptance(run: Path) -> None:
    replay = read_json(run / "result.json")["replay"]
    assert set(replay) == {"baseline", "candidate"}
    found = replay["baseline"]
    assert found["num_steps"] >= 60
    assert (found["num_agree"] + found["num_near_tie"]) / found["num_steps"] >= MIN_REPLAY_SHARE
    difference = abs(found["position_1_served"] - found["position_1_trained"])
    assert difference <= MAX_POSITION_1_DIFFERENCE


def test_baseline_against_itself_goes_on_after_a_stop(folder: Path, few_prompts: Path) -> None:
    out = folder / "itself"
    words = ("--baseline", "smollm2-eagle3", "--prompts", few_prompts, "--out", out)
    words = (*words, "--no-plain", "--no-replay", "--max-tokens", 20)
    measure("smollm2-eagle3", *words)
    result = read_json(out / "result.json")
    assert result["score"]["value"] == 100.0
    assert not result.get("replay")
    assert "plain" not in result["arms"]
    before = (out / "result.json").read_bytes()

    other = run_command("eval", "smollm2-eagle3", *SMOLLM2, "--rules", "demo", *words[:-1], 21)
    other.require(2, "holds a run with other settings", "--out")
    assert (out / "result.json").read_bytes() == before

    lines = _lines(out / "requests.jsonl")
    last = max(i for i, line in enumerate(lines) if '"kind": "answer"' in line)
    (out / "requests.jsonl").write_text("\n".join(lines[:last]) + "\n" + lines[last][:40])
    kept = read_answers(out)
    assert len(kept) == NUM_FEW - 1
    measure("smollm2-eagle3", *words)
    assert read_answers(out)[:-1] == kept
    assert len(read_answers(out)) == NUM_FEW
    assert read_json(out / "result.json")["score"]["value"] == 100.0


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_ngram_against_none(folder: Path, few_prompts: Path) -> None:
    out = folder / "ngram"
    words = ("--baseline", "none", "--prompts", few_prompts, "--max-tokens", 20, "--no-plain")
    measure("ngram", *words, "--out", out)
    result = read_json(out / "result.json")
    assert result["arms"]["candidate"]["engine"]["method"] == "ngram"
    assert result["arms"]["baseline"]["tau"]["value"] == pytest.approx(1.0)
    assert result["arms"]["candidate"]["tau"]["value"] >= 1.0
    assert result["ratios"]["memory"]["value"] == 1.0  # 0 bytes each
    run_command("score", out).require(0)
