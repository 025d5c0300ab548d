"""paceline tune: the fastest serving settings that leave the text the target's."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import console, say
from paceline.cli.data import THINKING_HELP
from paceline.data import Thinking
from paceline.errors import PlanError

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.target import TargetFacts
    from paceline.tune import Journal, Outcome, Settings

__all__ = ["tune"]

_FORMAT = "paceline-tune/1"
_BUSY = 0.1  # share of the machine that other work may have


def tune(
    target: Annotated[str, typer.Argument(help="A folder or a bundled name.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the search; goes on where it is.")],
    drafts: Annotated[
        list[str] | None,
        typer.Argument(help="Drafts to try: folders, bundled names, native, ngram or suffix."),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.0, help="Time for all trials together.")
    ] = 60.0,
    regimes: Annotated[
        list[str] | None,
        typer.Option("--regime", help="PROMPT:NEW tokens; else 64:128, 2048:256 and 8192:256."),
    ] = None,
    num_requests: Annotated[
        int, typer.Option("--requests", min=2, help="Measured requests a regime.")
    ] = 10,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Requests in flight.")
    ] = 1,
    num_texts: Annotated[
        int, typer.Option("--texts", min=1, help="Greedy answers held against the target's.")
    ] = 20,
    rules: Annotated[
        str, typer.Option("--rules", help="Rules whose fidelity limits are the gate.")
    ] = "demo",
    thinking: Annotated[Thinking, typer.Option("--thinking", help=THINKING_HELP)] = "none",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
) -> None:
    """Search drafts, K and engine settings for the fastest serving.

    One setting at a time. Every trial is a fresh engine and the same requests. Writes serve.toml
    for `paceline serve --config`, the plain command line, and every number; stopped, it goes on
    where it was.
    """
    from paceline.cli.bench import read_regimes
    from paceline.cli.tune_run import EngineBench, read_drafts
    from paceline.records import build_provenance, write_json
    from paceline.rules import read_rules
    from paceline.serve import find_device
    from paceline.target import read_target
    from paceline.tune import Journal, Settings, Situation, search, write_config

    facts = read_target(target)
    wanted = read_regimes(regimes)
    names = drafts if drafts else read_drafts(facts)
    if len(set(names)) != len(names):
        raise PlanError("a draft is named twice", fix="Name each draft once.")
    used = device or find_device()
    bench = EngineBench(
        facts,
        wanted,
        log_dir=out,
        rules=read_rules(rules),
        num_requests=num_requests,
        num_texts=num_texts,
        concurrency=concurrency,
        thinking=thinking,
        device=used,
    )
    bench.require_drafts(names)
    journal = Journal(
        out,
        {
            "target": facts.weights_fingerprint or str(facts.path),
            "drafts": names,
            "device": used,
            "regimes": [regime.name for regime in wanted],
            "requests": num_requests,
            "concurrency": concurrency,
            "texts": num_texts,
            "rules": rules,
            "thinking": thinking,
        },
    )
    outcome = search(
        [Settings(draft=name) for name in names],
        Situation(
            device=used,
            is_hybrid=facts.is_hybrid,
            concurrency=concurrency,
            gdn_head_dim=_find_gdn_head_dim(facts),
            windows={name: bench.find_windows(name) for name in names},
        ),
        bench,
        journal,
        budget_s=minutes * 60.0,
        clock=time.monotonic,
        tell=say,
    )
    title = f"{facts.name} on {used}, found by paceline tune"
    write_config(
        out / "serve.toml",
        bench.make_window(outcome.best),
        k=outcome.k,
        break_even=outcome.break_even,
        title=title,
    )
    _write_command(out / "command.sh", bench, outcome.best)
    record = {
        "format": _FORMAT,
        "provenance": build_provenance(seed=0),
        "target": facts.name,
        "seconds": journal.seconds,
        **_describe_outcome(outcome),
        "trials": journal.trials(),
    }
    write_json(out / "tune.json", record)
    shares = [row["other_cpu_share"] for t in journal.trials() for row in t.get("regimes", ())]
    hosts = {row.settings.key: _read_host(journal, row.settings) for row in outcome.rows}
    _show(
        outcome,
        facts,
        used,
        concurrency,
        other_share=max((s for s in shares if s is not None), default=0.0),
        hosts=hosts,
    )
    best = replace(outcome.best, stream_interval=None)  # was measured through HTTP alone
    for label, settings in (("target alone, eager", Settings()), ("best", best)):
        host = hosts.get(settings.key) or _read_host(journal, settings)
        say(f"host's part of a decode step, {label}: {_show_host(host)}")
    say(f"serve it: paceline serve {target} --config {out / 'serve.toml'}")
    say(f"without Paceline: {out / 'command.sh'}; every number: {out / 'tune.json'}")


def _describe_outcome(outcome: Outcome) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "best": asdict(outcome.best),
        "noise": outcome.noise,
        "k": outcome.k,
        "break_even_acceptance_length": outcome.break_even,
        "rows": [asdict(row) for row in outcome.rows],
        "knobs": [asdict(knob) for knob in outcome.knobs],
    }


def _write_command(path: Path, bench: Any, settings: Settings) -> None:
    from paceline.records import write_text
    from paceline.serve import format_command

    write_text(path, format_command(bench.plan(settings)) + "\n")


def _show(
    outcome: Outcome,
    target: TargetFacts,
    device: str,
    concurrency: int,
    *,
    other_share: float,
    hosts: dict[str, dict[str, Any] | None],
) -> None:
    flying = "one request at a time" if concurrency == 1 else f"{concurrency} requests in flight"
    say(f"{target.name} on {device}, {flying}: speed-up over the target alone, eager")
    console.print(_build_table(outcome, hosts))
    say("host: ms of a decode step beyond the models' own computing")
    for row in outcome.rows:
        if row.why:
            say(f"{row.label}: {row.verdict}: {row.why}")
    for knob in outcome.knobs:
        what = f"not searched: {knob.reason}" if knob.reason else f"to know: {knob.risk}"
        say(f"{knob.name} {what}")
    if outcome.noise is not None:
        say(f"noise floor (the target alone, started twice): {outcome.noise:.1%}")
    if other_share > _BUSY:
        say(f"other work took up to {other_share:.0%} of the machine: measure on a quiet one")
    if outcome.break_even is not None:
        say(f"the draft breaks even at an acceptance length of {outcome.break_even:.2f}")


def _read_host(journal: Journal, settings: Settings) -> dict[str, Any] | None:
    found: dict[str, Any] | None = (journal.find(settings.key) or {}).get("host")
    return found


def _show_host(host: dict[str, Any] | None) -> str:
    return "not measured" if host is None else f"{host['host_ms']:.2f} of {host['step_ms']:.2f} ms"


def _find_gdn_head_dim(target: TargetFacts) -> int | None:
    nested = target.config.get("text_config")
    found = {**(nested if isinstance(nested, dict) else {}), **target.config}
    return found.get("linear_key_head_dim")


def _build_table(outcome: Outcome, hosts: dict[str, dict[str, Any] | None]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("trial", "K", "speed-up", "95 %", "over best", "host", "verdict"):
        left = name in ("trial", "verdict")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "trial")
    for row in outcome.rows:
        found, ratio, host = row.speedup, row.ratio, hosts[row.settings.key]
        table.add_row(
            row.label,
            "" if not row.k else str(row.k),
            "1.000" if row.verdict == "baseline" else "-" if found is None else _value(found),
            "" if found is None else _interval(found),
            "" if ratio is None else _value(ratio),
            "-" if host is None else f"{host['host_ms']:.2f}",
            row.verdict,
        )
    return table


def _value(found: Any) -> str:
    return f"{found['mean']:.3f}"


def _interval(found: Any) -> str:
    return "-" if found["low"] is None else f"{found['low']:.2f} to {found['high']:.2f}"
