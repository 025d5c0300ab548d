"""What commands print: help, facts, findings and progress at 80 columns and in a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import typer.main
from command_line import Outcome
from rich.console import Console

from paceline.cli import console as console_module
from paceline.cli.app import app
from paceline.cli.console import plural, print_facts, progress
from paceline.cli.measure import plan_arms
from paceline.rules import read_rules
from paceline.target import read_target

Run = Callable[..., Outcome]


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*words, name))


ALL = list(_commands(typer.main.get_command(app)))


@pytest.mark.parametrize("words", [words for words, _ in ALL], ids=" ".join)
def test_help_fits_80_columns(run: Run, words: tuple[str, ...]) -> None:
    outcome = run(*words, "--help")
    outcome.require(0)
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    summaries = [line for line in lines if line.startswith("  ")]
    assert not any(line.endswith("...") for line in summaries), "a summary is cut"


def test_every_option_says_what_it_is() -> None:
    silent = [
        f"{' '.join(words)} {parameter.name}"
        for words, command in ALL
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert silent == []


def test_facts_are_whole_lines_in_a_file(run: Run) -> None:
    outcome = run("target", "show", "smollm2")
    outcome.require(0)
    facts = read_target("smollm2")
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("tokenizer sha256")]
    assert line.split() == ["tokenizer", "sha256", facts.tokenizer_sha256]
    assert all(line == line.rstrip() for line in outcome.out.splitlines())


def test_findings_hang_under_their_beginning(run: Run) -> None:
    outcome = run("validate", "smollm2-eagle3", "--target", "smollm2")
    outcome.require(0)
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) < 80
    start = next(i for i, line in enumerate(lines) if line.startswith("  note mem.est  by shape"))
    assert lines[start + 1].startswith("    ")
    assert lines[-1].startswith("verdict: ")
    assert "(0 errors, " in lines[-1]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    file = io.StringIO()
    shown = Console(file=file, width=40, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(console_module, "console", shown)
    return file


def test_facts_wrap_on_a_terminal(terminal: io.StringIO) -> None:
    print_facts("Title", [("a", "word " * 12), ("long label", "x")])
    lines = terminal.getvalue().splitlines()
    assert lines[0] == "Title"
    assert lines[1].startswith("a           word word")
    assert lines[2].startswith("            word")
    assert lines[-1] == "long label  x"
    assert max(map(len, lines)) < 40


def test_progress_in_a_file_says_done_total_and_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("paceline.cli.console.time.monotonic", lambda: now[0])
    with progress("answering") as show:
        for done in range(5):
            show(done, 4)
            now[0] += 4.0
    assert capsys.readouterr().out.splitlines() == [
        "answering: 0/4",
        "answering: 3/4  0.25/s",
        "answering: 4/4  0.25/s",
    ]


def test_counts_read_as_words() -> None:
    counts = [plural(n, "row") for n in (0, 1, 1200)]
    assert counts == ["0 rows", "1 row", "1,200 rows"]


def test_the_same_draft_is_served_once_and_arms_hold_the_longest_request() -> None:
    target, rules = read_target("smollm2"), read_rules("demo")
    drafts = {"baseline": "smollm2-eagle3", "candidate": "smollm2-eagle3", "plain": "none"}
    arms = plan_arms(target, drafts, rules, device="cpu", num_tokens=3000)
    assert [arm.name for arm in arms] == ["baseline", "plain"]
    assert [arm.plan.num_speculative_tokens for arm in arms] == [3, 0]
    assert {arm.plan.max_model_len for arm in arms} == {3000}
    short = plan_arms(target, {**drafts, "candidate": "ngram"}, rules, device="cpu", num_tokens=64)
    assert [arm.plan.method for arm in short] == ["eagle3", "ngram", "none"]
    assert {arm.plan.max_model_len for arm in short} == {2048}


def test_each_arm_takes_its_own_k_from_the_rules() -> None:
    target, rules = read_target("smollm2"), read_rules("demo")
    speculation = replace(rules.speculation, baseline_num_speculative_tokens=2)
    rules = replace(rules, speculation=speculation)
    drafts = {"baseline": "smollm2-eagle3", "candidate": "smollm2-eagle3"}
    arms = plan_arms(target, drafts, rules, device="cpu")
    assert [arm.plan.num_speculative_tokens for arm in arms] == [2, 3]
    (both,) = plan_arms(target, drafts, rules, device="cpu", num_speculative_tokens=4)
    assert both.plan.num_speculative_tokens == 4
