"""Bad input as a user meets it: one message, the right exit code, no traceback, no engine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import build_draft
from command_line import PACELINE, Outcome, fill_disk, mounted_disk, write_jsonl

from paceline.data import read_prompts
from paceline.draft import resolve_draft

Run = Callable[..., Outcome]
SMOLLM2 = ("--target", "smollm2")
RECIPE = """
family = "eagle3"
[draft]
num_speculative_tokens = 3
draft_vocab_size = 1024
[optim]
lr = 1e-3
num_steps = 3
tokens_per_batch = 256
max_length = 128
"""


def conversation(name: str, question: str) -> dict[str, object]:
    turns = [("user", question), ("assistant", "It is a short answer.")]
    return {"id": name, "messages": [{"role": who, "content": text} for who, text in turns]}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def data(tmp_path: Path, run: Run) -> Path:
    rows = [conversation(f"c{i}", f"What is the number after {i}?") for i in range(3)]
    path = write_jsonl(tmp_path / "talks.jsonl", [*rows])
    run("data", "tokenize", path, *SMOLLM2, "--out", tmp_path / "data").require(0)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("validate", "nowhere"), "there is no draft 'nowhere'"),
        (("eval", "nowhere", *SMOLLM2, "--out", "run"), "there is no draft 'nowhere'"),
        (("eval", "none", "--baseline", "nowhere", *SMOLLM2, "--out", "run"), "no draft 'nowhere'"),
        (("eval", "none", "--target", "nowhere", "--out", "run"), "no such target"),
        (("target", "show", "nowhere"), "nowhere: there is no such target"),
        (("serve", "nowhere"), "nowhere: there is no such target"),
        (("score", "nowhere"), "nowhere/result.json: the file does not exist"),
        (("report", "nowhere"), "nowhere/result.json: the file does not exist"),
        (("data", "show", "nowhere", *SMOLLM2), "nowhere/data.json: the file does not exist"),
        (("data", "answer", "--prompts", "no.jsonl", *SMOLLM2, "--out", "d"), "no.jsonl"),
        (("data", "tokenize", "no.jsonl", *SMOLLM2, "--out", "d"), "no.jsonl"),
        (("train", "no.toml", *SMOLLM2, "--data", "d", "--out", "o"), "no.toml: the recipe does"),
    ],
)
def test_missing_things_are_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run(*words).require(2, expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("--k", "99"), "K = 99 drafted tokens a step is out of range; expected 1 to 64"),
        (("--rules", "nope"), "nope: there are no such rules"),
        (("--prompts", "nope"), "nope: there is no such prompt file"),
        (("--thinking", "on"), "thinking on has no effect"),
        (("--max-tokens", "9000"), "at most 8,192, the target's positions"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
    ],
)
def test_settings_that_cannot_work(
    run: Run, tmp_path: Path, settings: tuple[str, ...], expected: str
) -> None:
    out = tmp_path / "run"
    run("eval", "smollm2-eagle3", *SMOLLM2, "--out", out, *settings).require(2, expected)
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("--data-parallel", "999"), "999 engines at once, and this machine has"),
        (
            ("--data-parallel", "2", "--server", "http://127.0.0.1:9/v1"),
            "--data-parallel has no effect with --server",
        ),
    ],
)
def test_engines_that_cannot_answer_together(
    run: Run, tmp_path: Path, settings: tuple[str, ...], expected: str
) -> None:
    words = ("data", "answer", "--prompts", "train:8", *SMOLLM2, "--out", tmp_path / "data")
    run(*words, *settings).require(2, expected)
    assert not (tmp_path / "data").exists()


def test_k_without_a_drafting_arm(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("eval", "none", *SMOLLM2, "--k", "3", "--out", out).require(2, "K = 3 has no effect")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("trian",), "No such command 'trian'"),
        (("score", "x", "--nope"), "No such option: --nope"),
        (("train",), "Missing argument 'recipe'"),
        (("eval", "none", "--k", "zero", *SMOLLM2, "--out", "x"), "value for '--k'"),
        (("eval", "none", "--thinking", "maybe", *SMOLLM2, "--out", "x"), "'--thinking'"),
    ],
)
def test_usage_errors_exit_with_2(run: Run, words: tuple[str, ...], expected: str) -> None:
    outcome = run(*words)
    assert outcome.code == 2
    assert expected in outcome.err
    assert "--help" in outcome.err


def test_half_written_weights(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(resolve_draft("smollm2-eagle3"), folder)
    weights = folder / "model.safetensors"
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    out = tmp_path / "run"
    run("eval", folder, *SMOLLM2, "--out", out).require(2, "model.safetensors: is cut short")
    run("serve", "smollm2", "--draft", folder).require(2, "model.safetensors: is cut short")
    checked = run("validate", folder, *SMOLLM2)
    assert checked.code == 2
    assert "error st.cover" in checked.out
    assert "verdict: fail" in checked.out


def test_draft_of_another_target(run: Run, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "small")
    outcome = run("eval", folder, *SMOLLM2, "--out", tmp_path / "run")
    outcome.require(2, "hidden_size 16, smollm2 has 576", "Point --target at the model")


def test_prompts_all_bad(run: Run, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", ["not json", {"messages": []}])
    for words in (("data", "answer", "--prompts", path), ("eval", "none", "--prompts", path)):
        run(*words, *SMOLLM2, "--out", tmp_path / "o").require(2, "no usable prompt", "line 1")
    assert not (tmp_path / "o").exists()


def test_prompts_mostly_bad_are_refused(run: Run, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", ["not json", {"messages": []}, {"prompt": "Hi"}])
    outcome = run("data", "answer", "--prompts", path, *SMOLLM2, "--out", tmp_path / "o")
    outcome.require(2, "2 of 3 prompts were rejected", "line 1")


def test_rejected_lines_are_told_once(run: Run, tmp_path: Path) -> None:
    rows = [conversation("a", "Hello?"), "not json", conversation("b", "A <|im_end|> inside")]
    path = write_jsonl(tmp_path / "talks.jsonl", [*rows, conversation("c", "And you?")])
    outcome = run("data", "tokenize", path, *SMOLLM2, "--out", tmp_path / "data")
    outcome.require(0)
    assert outcome.out.count("line 2 rejected") == 1
    assert outcome.out.count("line 3 (b) rejected: the user text holds the control token") == 1
    last = outcome.out.splitlines()[-1]
    assert "data: " in last
    assert "2 rows, 2 rejected; " in last
    assert "{" not in outcome.out


def test_unknown_recipe_key(run: Run, tmp_path: Path, data: Path, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("lr =", "learning_rate ="))
    outcome = run("train", recipe, *SMOLLM2, "--data", data, "--out", tmp_path / "draft")
    outcome.require(2, "key 'optim.learning_rate' is not a recipe key", "recipe.toml")


def test_training_on_measured_prompts(run: Run, tmp_path: Path, recipe: Path) -> None:
    held_out = read_prompts("held-out").prompts[7]
    question = held_out.messages[-1]["content"]
    rows = [conversation("fine", "What is the number after 4?"), conversation("copy", question)]
    path = write_jsonl(tmp_path / "talks.jsonl", [*rows])
    run("data", "tokenize", path, *SMOLLM2, "--out", tmp_path / "data").require(0)
    outcome = run("train", recipe, *SMOLLM2, "--data", tmp_path / "data", "--out", tmp_path / "o")
    outcome.require(2, f"row 'copy' has '{held_out.prompt_id}'", "held-out")
    assert "'fine'" not in outcome.err
    assert not (tmp_path / "o").exists()


def test_train_keeps_what_is_there(run: Run, tmp_path: Path, data: Path, recipe: Path) -> None:
    out = tmp_path / "draft"
    out.mkdir()
    (out / "mine").write_text("kept")
    words = ("train", recipe, *SMOLLM2, "--data", data, "--out", out)
    run(*words).require(5, f"{out}: already exists", "Choose another --out")
    assert (out / "mine").read_text() == "kept"


def test_resume_without_a_checkpoint(run: Run, tmp_path: Path, data: Path, recipe: Path) -> None:
    words = ("train", recipe, *SMOLLM2, "--data", data, "--out", tmp_path / "draft", "--resume")
    run(*words).require(2, "no checkpoint to go on from", "Start without --resume")


def test_eval_leaves_a_folder_of_something_else_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    done = run("eval", "ngram", "--target", "smollm2", "--out", str(tmp_path / "notes"))
    assert done.code == 2
    assert "holds 'todo.txt' and no run" in done.err
    assert [item.name for item in (tmp_path / "notes").iterdir()] == ["todo.txt"]


def test_demo_replaces_only_a_demo(run: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("kept")
    run("demo", "--out", tmp_path).require(5, "holds 'thesis.txt'", "Choose another --out")
    assert (tmp_path / "thesis.txt").read_text() == "kept"


def test_out_that_cannot_be_a_folder(run: Run, tmp_path: Path, data: Path, recipe: Path) -> None:
    (tmp_path / "file").write_text("kept")
    out = tmp_path / "file" / "inside"
    talks = tmp_path / "talks.jsonl"
    for words in (
        ("eval", "none", *SMOLLM2, "--out", out),
        ("data", "answer", "--prompts", "train:8", *SMOLLM2, "--out", out),
        ("data", "tokenize", talks, *SMOLLM2, "--out", out),
        ("train", recipe, *SMOLLM2, "--data", data, "--out", out),
    ):
        run(*words).require(5, str(out), "cannot be written")


def test_replay_without_torch_says_what_to_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> object:
        return None if name in ("torch", "safetensors") else object()

    monkeypatch.setattr("paceline.cli.measure.find_spec", find)
    outcome = run("eval", "smollm2-eagle3", *SMOLLM2, "--out", tmp_path / "run")
    outcome.require(2, "needs torch and safetensors", "paceline[train]", "--no-replay")
    assert not (tmp_path / "run").exists()


def test_our_own_fault_is_called_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: object, **settings: object) -> None:
        raise ZeroDivisionError("made for this test")

    monkeypatch.setattr("paceline.validate.validate_draft", fail)
    outcome = run("validate", "smollm2-eagle3")
    outcome.require(3, "internal fault (ZeroDivisionError: made for this test)", "not yours")
    kept = Path(outcome.err.split()[-1])
    assert "made for this test" in kept.read_text()
    kept.unlink()


def test_ctrl_c_says_how_to_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*words: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.validate.validate_draft", stop)
    run("validate", "smollm2-eagle3").require(130, "run the same command again")


def test_library_that_tells_of_a_full_disk_in_words(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object, **settings: object) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("paceline.validate.validate_draft", fail)
    run("validate", "smollm2-eagle3").require(5, "the disk is full")


@pytest.mark.parametrize("words", [("validate", "smollm2-eagle3", "--json"), ("--help",)])
def test_output_to_a_full_disk(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([PACELINE, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    outcome = Outcome(code=done.returncode, out="", err=done.stderr)
    outcome.require(5, "standard output: the disk is full")


def test_reader_that_stops_early() -> None:
    words = f"{PACELINE} validate smollm2-eagle3 --json | head -c 1"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True)
    assert done.stdout == "{"
    assert done.stderr == ""


def test_folders_on_a_full_disk(run: Run, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "talks.jsonl", [conversation("a", "What comes after 4?")])
    with mounted_disk(tmp_path / "disk", size="64k") as disk:
        fill_disk(disk)
        for words in (
            ("data", "tokenize", path, *SMOLLM2, "--out", disk / "data"),
            ("eval", "none", *SMOLLM2, "--out", disk / "run"),
            ("data", "answer", "--prompts", "train:8", *SMOLLM2, "--out", disk / "answers"),
        ):
            run(*words).require(5, "the disk is full", str(disk))
        (disk / "filler").unlink()
        run("data", "tokenize", path, *SMOLLM2, "--out", disk / "data").require(0)
