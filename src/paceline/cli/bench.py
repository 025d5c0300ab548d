"""paceline bench: latency by prompt length and speed-up over an unoptimised baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import console, plural, progress, say
from paceline.cli.data import THINKING_HELP
from paceline.data import Thinking
from paceline.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.eval import Ask, Regime
    from paceline.serve import Plan
    from paceline.target import TargetFacts

    Measure = Callable[[str, Ask, bool], list[dict[str, Any]]]

__all__ = ["bench", "read_bench_text", "read_regimes"]

_NUM_WARM_UP = 2
_TEXTS_AT_ONCE = 32
_FORMAT = "paceline-bench/1"


def bench(
    target: Annotated[str, typer.Argument(help="A folder or a bundled name.")],
    drafts: Annotated[
        list[str] | None,
        typer.Option("--draft", help="A draft folder, a bundled draft, ngram, suffix or none."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Settings that `paceline tune` wrote, for every draft."),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="A running OpenAI-compatible server to measure.")
    ] = None,
    baseline_url: Annotated[
        str | None, typer.Option("--baseline-url", help="A running server as the baseline.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The servers' name of the model; else asked.")
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline", help="Measure the target alone, eager, first: 1.0."
        ),
    ] = True,
    regimes: Annotated[
        list[str] | None,
        typer.Option("--regime", help="PROMPT:NEW tokens; else 64:128, 2048:256 and 8192:256."),
    ] = None,
    num_requests: Annotated[
        int, typer.Option("--requests", min=1, help="Measured requests a regime.")
    ] = 10,
    repeated: Annotated[
        bool,
        typer.Option("--repeated", help="One prompt again and again: measures caches, not drafts."),
    ] = False,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching", help="Leave vLLM's prefix cache on.")
    ] = False,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--k", min=1, help="Drafted tokens a step; else from the draft.")
    ] = None,
    thinking: Annotated[Thinking, typer.Option("--thinking", help=THINKING_HELP)] = "none",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write every number to this JSON file.")
    ] = None,
) -> None:
    """Measure latency and speed-up at fixed lengths of text.

    One request at a time. The baseline is the target alone, eager, without CUDA graphs; speed-up is
    its mean latency over an arm's, averaged over the regimes.
    """
    from paceline.eval import ask_server, build_bench_requests, find_model, measure_arm
    from paceline.records import build_provenance, sha256_bytes, write_json
    from paceline.serve import ServeConfig, read_serve_config
    from paceline.target import read_target

    settings = read_serve_config(config) if config is not None else ServeConfig()
    if not drafts and settings.draft is not None:
        drafts = [settings.draft]
    if not drafts and url is None:
        raise PlanError("there is nothing to measure", fix="Name a --draft or a --url.")
    if not drafts and config is not None:
        raise PlanError("--config has no effect on a running server", fix="Leave it out.")
    if baseline_url is not None and not baseline:
        raise PlanError("--baseline-url has no effect with --no-baseline", fix="Leave one out.")
    facts = read_target(target)
    wanted = read_regimes(regimes)
    longest = max(regime.prompt_tokens + regime.new_tokens for regime in wanted)
    if longest > facts.max_position_embeddings:
        raise PlanError(
            f"a regime needs {longest:,} tokens",
            where=facts.name,
            expected=f"at most {facts.max_position_embeddings:,}, the target's positions",
            fix="Name shorter ones with --regime PROMPT:NEW.",
        )
    total = sum(regime.prompt_tokens for regime in wanted) * (_NUM_WARM_UP + num_requests)
    requests = build_bench_requests(
        *read_bench_text(facts, thinking, total),
        wanted,
        num_requests=num_requests,
        num_warm_up=_NUM_WARM_UP,
        repeated=repeated,
    )
    plans = _plan_arms(
        facts,
        drafts or [],
        with_baseline=baseline and baseline_url is None,
        length=longest,
        k=num_speculative_tokens or settings.k,
        engine={**settings.engine, **({"prefix_caching": True} if prefix_caching else {})},
        device=device,
    )
    asked = [ids for _, rows in requests.values() for ids in (row.prompt_ids for row in rows)]
    result: dict[str, Any] = {
        "format": _FORMAT,
        "provenance": build_provenance(seed=0),
        "target": facts.name,
        "prompts": "repeated" if repeated else "unique",
        "prompts_sha256": sha256_bytes(repr(asked).encode()),
        "engine_settings": dict(settings.engine),
        "prefix_caching": prefix_caching or settings.engine.get("prefix_caching", False),
        "arms": {},
    }

    def measure(name: str, ask: Ask, gpu: bool) -> list[dict[str, Any]]:
        with progress(f"measuring {name}") as show:
            return measure_arm(ask, requests, gpu=gpu, on_progress=show)

    servers = {"baseline": baseline_url} if baseline_url else {}
    servers |= {"server": url} if url else {}
    for name, address in servers.items():
        named = model or find_model(address)
        measured = measure(name, ask_server(address, named), True)
        result["arms"][name] = {"url": address, "model": named, "regimes": measured}
    for name, plan in plans.items():
        result["arms"][name] = _measure_plan(name, plan, measure)
    _compare(result)
    _show(result)
    if out is not None:
        write_json(out, result)
        say(f"every number: {out}")


def read_regimes(words: list[str] | None) -> tuple[Regime, ...]:
    from paceline.eval import REGIMES, Regime

    if not words:
        return REGIMES
    found = []
    for word in words:
        prompt, colon, new = word.partition(":")
        numbers = [int(part) if part.isdecimal() else 0 for part in (prompt, new)]
        if not colon or numbers[0] < 1 or numbers[1] < 2:
            raise PlanError(
                f"--regime {word!r} is no regime",
                expected="PROMPT:NEW in tokens, at least two new ones, for example 2048:256",
            )
        found.append(Regime(prompt_tokens=numbers[0], new_tokens=numbers[1]))
    if len(set(found)) != len(found):
        raise PlanError("a regime is named twice", where="--regime", fix="Name each once.")
    return tuple(found)


def read_bench_text(
    target: TargetFacts, thinking: Thinking, num_tokens: int
) -> tuple[list[int], tuple[tuple[int, ...], tuple[int, ...]]]:
    """num_tokens ids of bundled prompts (fewer: all of them), and the chat template's two ends."""
    from paceline.data import open_tokenizer, read_prompts

    tokenizer = open_tokenizer(target, thinking=thinking)
    mark = "PROMPT"
    before, _, after = tokenizer.render([{"role": "user", "content": mark}], ask=True).partition(
        mark
    )
    texts = [prompt.messages[-1]["content"] for prompt in read_prompts("train").prompts]
    ids: list[int] = []
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        if len(ids) >= num_tokens:
            break
        ids += tokenizer.encode("\n".join(texts[begin : begin + _TEXTS_AT_ONCE]) + "\n")
    return ids, (tokenizer.encode(before), tokenizer.encode(after))


def _plan_arms(
    target: TargetFacts,
    drafts: list[str],
    *,
    with_baseline: bool,
    length: int,
    k: int | None,
    engine: Mapping[str, Any],
    device: str | None,
) -> dict[str, Plan]:
    """Every plan checked before anything starts. engine: settings of every arm but the baseline."""
    from paceline.cli.arms import build_arm_plan
    from paceline.serve import apply_engine_settings, build_plan, check_plan

    plans: dict[str, Plan] = {}
    if with_baseline:
        plans["baseline"] = build_plan(
            target, max_model_len=length, max_num_seqs=1, enforce_eager=True, device=device
        )
    compiled = engine.get("compiled")
    for words in drafts:
        if words in plans:
            raise PlanError(f"--draft {words} is named twice", fix="Name each draft once.")
        plan = build_arm_plan(
            target,
            words,
            num_speculative_tokens=None if words == "none" else k,
            max_model_len=min(target.max_position_embeddings, length + (k or 16) + 1),
            max_num_seqs=1,
            prefix_caching=engine.get("prefix_caching", False),
            enforce_eager=None if compiled is None else not compiled,
            device=device,
        )
        plans[words] = apply_engine_settings(plan, engine)
    for name, plan in plans.items():
        for note in check_plan(plan):
            say(f"note on {name}: {note}")
    return plans


def _measure_plan(name: str, plan: Plan, measure: Measure) -> dict[str, Any]:
    import dataclasses
    import tempfile

    from paceline.eval import ask_endpoint
    from paceline.serve import start

    say(f"starting {name} ({plan.method}) on vLLM ...")
    with (
        tempfile.TemporaryDirectory() as folder,
        start(plan, log_path=Path(folder) / "engine.log") as endpoint,
    ):
        regimes = measure(name, ask_endpoint(endpoint), plan.device == "cuda")
        return {"engine": dataclasses.asdict(endpoint.facts), "regimes": regimes}


def _compare(result: dict[str, Any]) -> None:
    from paceline.eval import compare_arms

    baseline = result["arms"].get("baseline")
    for name, arm in result["arms"].items():
        arm["speedup"] = (
            None
            if baseline is None or name == "baseline"
            else compare_arms(baseline["regimes"], arm["regimes"])
        )


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    repeated = result["prompts"] == "repeated"
    say(
        f"{result['target']}, {result['prompts']} prompts, one request at a time, medians"
        + (": caches answer the repeated prompt, not the draft" if repeated else "")
    )
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(
        ("arm", "prompt:new", "latency ms", "TTFT", "TPOT", "tau", "J/token", "speed-up")
    ):
        table.add_column(column, justify="left" if number < 2 else "right")
    for name, arm in result["arms"].items():
        ratios = arm["speedup"]["regimes"] if arm["speedup"] else [None] * len(arm["regimes"])
        for record, ratio in zip(arm["regimes"], ratios, strict=True):
            table.add_row(
                name,
                f"{record['prompt_tokens']}:{record['new_tokens']}",
                _number(record["latency_ms"]["median"], 0),
                _number(record["ttft_ms"]["median"], 1),
                _number(record["tpot_ms"]["median"], 2),
                _number(record["tau"], 2),
                _number(record["energy_j_per_token"], 2),
                "" if name == "baseline" else _number(ratio, 2),
            )
    console.print(table)
    for name, arm in result["arms"].items():
        found = arm["speedup"]
        if found is not None:
            interval = (
                f" ({found['low']:.3f} to {found['high']:.3f}, 95 %)"
                if found["low"] is not None
                else " (no interval: too few prompts)"
            )
            over = plural(len(found["regimes"]), "regime")
            say(f"{name}: mean speed-up over {over} {found['mean']:.3f}{interval}")
    if "baseline" not in result["arms"]:
        say("speed-up: not measured, there is no baseline")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
