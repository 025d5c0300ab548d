"""paceline quality: does an optimised target still answer as well as the plain one?"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import console, plural, progress, say
from paceline.cli.data import THINKING_HELP
from paceline.data import Thinking
from paceline.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.eval import AskedQuestion, Converse
    from paceline.rules import Challenge
    from paceline.serve import Plan
    from paceline.target import TargetFacts

__all__ = ["quality"]

_FAILED, _UNDECIDED = 2, 1
_CONCURRENCY = 8
_PROMPT_TOKENS = 4096  # of the longest questions, five examples before them


def quality(
    target: Annotated[str, typer.Argument(help="The optimised target: a folder or a name.")],
    out: Annotated[Path, typer.Option("--out", help="Write every answer to this JSON file.")],
    draft: Annotated[
        str | None,
        typer.Option("--draft", help="Serve it with a draft: a folder, native, ngram or suffix."),
    ] = None,
    plain: Annotated[
        str | None,
        typer.Option("--plain", help="The unoptimised target; TARGET alone where --draft is."),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask a running OpenAI-compatible server instead.")
    ] = None,
    plain_url: Annotated[
        str | None, typer.Option("--plain-url", help="A running server of the unoptimised target.")
    ] = None,
    challenge: Annotated[
        str, typer.Option("--rules", help="A challenge's quality gates, by name or file.")
    ] = "adaptfm-2026",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", help="mmlu_pro, ifeval or gpqa_diamond; else all three."),
    ] = None,
    questions: Annotated[
        str,
        typer.Option(
            "--questions",
            help="hub (the data sets), bundled (40 easy ones: a rehearsal) or a folder.",
        ),
    ] = "hub",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="The first questions of each task alone.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest answer; else from the rules.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--k", min=1, help="Drafted tokens a step; else from the draft.")
    ] = None,
    thinking: Annotated[Thinking, typer.Option("--thinking", help=THINKING_HELP)] = "none",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
) -> None:
    """Hold a served target to a challenge's quality gates.

    MMLU-Pro, IFEval and GPQA-Diamond by lm-evaluation-harness, each question asked of the
    unoptimised target too. Exit code 0 for pass, 1 where it stays undecided, 2 for fail.
    """
    from paceline.eval import QUALITY_FORMAT, build_quality, hash_questions
    from paceline.records import build_provenance, write_json
    from paceline.report import render_quality
    from paceline.rules import read_challenge
    from paceline.target import read_target

    if url is not None and (draft is not None or num_speculative_tokens is not None):
        raise PlanError(
            "--draft and --k have no effect on a running server", fix="Leave out one of them."
        )
    if plain is not None and plain_url is not None:
        raise PlanError("--plain and --plain-url are both given", fix="Leave out one of them.")
    rules = read_challenge(challenge)
    names = _read_tasks(rules, tasks)
    folder = _read_questions(questions)
    length = max_tokens or rules.answers.max_tokens
    facts = read_target(target)
    other = read_target(plain) if plain is not None else facts
    arms = {
        "arm": _plan(
            facts,
            draft or "none",
            length,
            k=num_speculative_tokens,
            device=device,
            url=url,
        )
    }
    if plain is not None or plain_url is not None or draft is not None:
        arms["plain"] = _plan(other, "none", length, k=None, device=device, url=plain_url)
    found: dict[str, dict[str, list[AskedQuestion]]] = {}
    for arm, plan in arms.items():
        served = facts if arm == "arm" else other
        address = url if arm == "arm" else plain_url
        with _open(arm, served, plan, address, thinking) as converse:
            found[arm] = _ask(converse, rules, names, folder, length, limit)
    applies = ((plain and other.name) or facts.name).split("/")[-1] == rules.target.name
    record: dict[str, Any] = {
        "format": QUALITY_FORMAT,
        "provenance": build_provenance(seed=0),
        "challenge": {
            "name": rules.name,
            "version": rules.version,
            "sha256": rules.sha256,
            "provisional": list(rules.provisional),
        },
        "target": facts.name,
        "draft": draft,
        "url": url,
        "plain": (plain_url or other.name) if "plain" in arms else None,
        "questions": questions,
        "questions_sha256": {name: hash_questions(folder, name) for name in names}
        if folder
        else None,
        "limit": limit,
        "max_tokens": length,
        "thinking": thinking,
        **build_quality(rules, found["arm"], found.get("plain"), applies_minimum=applies),
    }
    write_json(out, record)
    say(f"{facts.name} on {rules.name} (version {rules.version}), {questions} questions")
    console.print(render_quality(record))
    say(f"{plural(len(rules.provisional), 'value')} of the rules not published: see {challenge}")
    say(f"every answer: {out}")
    if record["verdict"] != "pass":
        raise typer.Exit(_FAILED if record["verdict"] == "fail" else _UNDECIDED)


def _read_tasks(rules: Challenge, words: list[str] | None) -> list[str]:
    from paceline.rules import GATE_NAMES

    names = words or list(GATE_NAMES)
    for name in names:
        rules.gate(name)
    if len(set(names)) != len(names):
        raise PlanError("a task is named twice", where="--task", fix="Name each once.")
    return names


def _read_questions(words: str) -> Path | None:
    from paceline.eval import BUNDLED_QUESTIONS

    if words == "hub":
        return None
    folder = BUNDLED_QUESTIONS if words == "bundled" else Path(words)
    if not folder.is_dir():
        raise PlanError(
            "there is no such folder of questions",
            where=words,
            expected="hub, bundled, or a folder with mmlu_pro/test.jsonl and the like",
        )
    return folder


def _plan(
    target: TargetFacts,
    draft: str,
    max_tokens: int,
    *,
    k: int | None,
    device: str | None,
    url: str | None,
) -> Plan | None:
    """A checked plan; None for a server that runs already."""
    from paceline.cli.arms import build_arm_plan
    from paceline.serve import check_plan

    if url is not None:
        return None
    plan = build_arm_plan(
        target,
        draft,
        num_speculative_tokens=k,
        num_tokens=min(target.max_position_embeddings, max_tokens + _PROMPT_TOKENS),
        max_num_seqs=_CONCURRENCY,
        device=device,
    )
    for note in check_plan(plan):
        say(f"note: {note}")
    return plan


@contextlib.contextmanager
def _open(
    arm: str, target: TargetFacts, plan: Plan | None, url: str | None, thinking: Thinking
) -> Iterator[Converse]:
    from paceline.data import open_tokenizer
    from paceline.eval import converse_endpoint, converse_server, find_model
    from paceline.serve import start

    label = {"arm": "the optimised target", "plain": "the plain target"}[arm]
    with progress(f"asking {label}") as show:
        if url is not None:
            yield converse_server(
                url, find_model(url), thinking=thinking, concurrency=_CONCURRENCY, on_progress=show
            )
            return
        assert plan is not None
        tokenizer = open_tokenizer(target, thinking=thinking)
        say(f"starting {label}, {target.name} ({plan.method}), on vLLM ...")
        with (
            tempfile.TemporaryDirectory() as folder,
            start(plan, log_path=Path(folder) / "engine.log") as endpoint,
        ):
            yield converse_endpoint(endpoint, tokenizer, concurrency=_CONCURRENCY, on_progress=show)


def _ask(
    converse: Converse,
    rules: Challenge,
    names: list[str],
    folder: Path | None,
    max_tokens: int,
    limit: int | None,
) -> dict[str, list[AskedQuestion]]:
    from paceline.eval import ask_task

    return {
        name: ask_task(
            converse,
            name,
            rules.gate(name),
            questions=folder,
            max_tokens=max_tokens,
            limit=limit,
        )
        for name in names
    }
