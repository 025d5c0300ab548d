"""A draft against itself in one cycle of fresh servers, on real vLLM, through the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import run_command, write_jsonl

from paceline.records import read_json, read_jsonl
from paceline.target import cache_folder

pytestmark = [pytest.mark.engine, pytest.mark.alone]

QUESTIONS = (
    "Say hello to a neighbour who moved in today.",
    "What should I bring to a picnic?",
    "Explain why the sky is blue to a child.",
    "Explain how bread rises.",
    "Name three colours.",
    "Write a sentence about the sea.",
)


def test_a_draft_against_itself_gives_the_noise_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a cache of its own for the floor, the unpacked target from the real one
    own = tmp_path / "cache"
    own.mkdir()
    for folder in cache_folder().iterdir():
        if folder.name != "noise":
            (own / folder.name).symlink_to(folder)
    monkeypatch.setenv("PACELINE_CACHE", str(own))
    prompts = write_jsonl(
        tmp_path / "prompts.jsonl", [{"prompt": text, "category": "chat"} for text in QUESTIONS]
    )
    out = tmp_path / "run"
    words = ("--target", "smollm2", "--rules", "demo", "--prompts", prompts, "--max-tokens", 18)
    words = (*words, "--no-plain", "--no-replay", "--cycles", 1, "--noise-floor", "--out", out)
    outcome = run_command("eval", "smollm2-eagle3", *words, timeout_s=240.0)
    outcome.require(0)
    assert "noise floor of this machine:" in outcome.out
    assert "1 cycle of A B B A, fresh servers" in outcome.out

    result = read_json(out / "result.json")
    assert result["protocol"]["kind"] == "cycles"
    asked = [
        (row["arm"], row["block"])
        for row in read_jsonl(out / "requests.jsonl")
        if row["kind"] == "segment"
    ]
    voids = len(result["protocol"]["voids"])  # a busy machine measures blocks again
    assert len(asked) == 4 + voids
    assert set(asked) == {(arm, block) for arm in ("baseline", "candidate") for block in (0, 1)}
    assert result["ratios"]["tau"]["value"] == 1.0  # greedy, and the same servers
    (floor,) = (read_json(path) for path in (own / "noise").glob("*.json"))
    assert result["noise_floor"] == floor
    assert abs(result["score"]["value"] - 100) <= floor["score"]
    assert result["score"]["tie"] is True

    run_command("score", out).require(0)
    again = tmp_path / "again"
    shutil.copytree(out, again)
    compared = run_command("compare", out, again)
    compared.require(0)
    assert "tie: within the noise floor" in compared.out
