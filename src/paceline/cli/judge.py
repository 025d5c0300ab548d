"""paceline judge: take submissions, measure them one by one, publish signed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import console, plural, say
from paceline.cli.data import THINKING_HELP
from paceline.data import Thinking

if TYPE_CHECKING:
    from paceline.judge import Home, Queue
    from paceline.rules import Rules

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Take submissions, measure them, publish the results.")

_Home = Annotated[Path, typer.Option("--home", help="The judge's folder; workers share it.")]
_Queue = Annotated[
    str | None,
    typer.Option("--queue", help="postgresql://user@host/database; else SQLite in --home."),
]
_Rules = Annotated[str, typer.Option("--rules", help="Rules by name or file.")]
_DEFAULT_HOME = Path("judge")


@app.command("add")
def add(
    draft: Annotated[str, typer.Argument(help="owner/name@COMMIT, or a draft folder.")],
    team: Annotated[str, typer.Option("--team", help="Whose draft it is.")],
    final: Annotated[bool, typer.Option("--final", help="The team's one final entry.")] = False,
    rules: _Rules = "emc2-2027",
    home: _Home = _DEFAULT_HOME,
    queue: _Queue = None,
) -> None:
    """Enter a draft: copied, checked, queued by content."""
    from paceline.judge import submit_draft
    from paceline.records import clear_folder
    from paceline.rules import read_rules

    contest = read_rules(rules)
    place, opened = _open(home, queue, contest)
    fetched = home / "fetched"
    entry, is_new = submit_draft(
        draft,
        team=team,
        home=place,
        queue=opened,
        rules=contest,
        fetch=lambda source: _fetch(source, fetched, contest.limits.max_files_bytes),
        is_final=final,
    )
    clear_folder(fetched)  # it is in the judge's own keeping now
    state = "entered" if is_new else f"known already: {entry.state}"
    mark = ", final" if entry.is_final else ""
    say(f"entry {entry.entry_id}: {state}{mark}; content {entry.content_sha256[:16]}")


@app.command("run")
def run(
    target: Annotated[str, typer.Option("--target", help="A folder or a bundled name.")],
    prompts: Annotated[str, typer.Option("--prompts", help="The hidden prompts, a JSONL file.")],
    baseline: Annotated[str, typer.Option("--baseline", help="What scores 100.")],
    twin: Annotated[
        str | None, typer.Option("--twin", help="Public prompts drawn like the hidden ones.")
    ] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Measure in a second order too: no state is kept.")
    ] = False,
    boot: Annotated[
        bool, typer.Option("--boot", help="Start each draft on public prompts first, and look.")
    ] = False,
    cycles: Annotated[
        int | None,
        typer.Option("--cycles", min=1, help="Fresh servers in A B B A blocks, so many times."),
    ] = None,
    thinking: Annotated[Thinking, typer.Option("--thinking", help=THINKING_HELP)] = "none",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
    max_entries: Annotated[
        int | None, typer.Option("--max-entries", min=1, help="Stop after so many.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay for entries that come later.")] = False,
    lease_s: Annotated[
        float, typer.Option("--lease", min=1, help="Seconds until a silent worker is replaced.")
    ] = 60.0,
    rules: _Rules = "emc2-2027",
    home: _Home = _DEFAULT_HOME,
    queue: _Queue = None,
) -> None:
    """Measure what waits, one entry at a time on this device.

    Engines run in a sandbox. Nothing of the hidden prompts is printed, logged or published. After
    a kill the same command goes on where it stopped.
    """
    from paceline.cli.judge_run import build_bench
    from paceline.judge import Court, pin_setting, run_worker
    from paceline.rules import read_rules

    contest = read_rules(rules)
    place, opened = _open(home, queue, contest)
    bench = build_bench(
        target_name=target,
        hidden=prompts,
        twin=twin,
        shuffle=shuffle,
        baseline=baseline,
        rules=contest,
        thinking=thinking,
        device=device,
        num_cycles=cycles,
    )
    for line in bench.notes:
        say(line)
    for name, (value, what) in bench.pinned.items():
        pin_setting(opened, name, value, what=what)
    num = run_worker(
        Court(
            home=place,
            queue=opened,
            rules=contest,
            target=bench.target,
            screen=bench.screen,
            measure=bench.measure,
            boot=bench.boot if boot else None,
            parts=bench.parts,
            devices=bench.devices,
            lease_s=lease_s,
            say=say,
        ),
        max_entries=max_entries,
        wait=wait,
    )
    say(f"{plural(num, 'entry') if num == 1 else f'{num} entries'} came to an end")


@app.command("status")
def status(
    home: _Home = _DEFAULT_HOME,
    queue: _Queue = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every entry and where it is."""
    from dataclasses import asdict

    from paceline.judge import list_entries

    place, opened = _open(home, queue, None)
    entries = list_entries(opened)
    if as_json:
        typer.echo(json.dumps({"entries": [asdict(entry) for entry in entries]}, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("entry", "team", "draft", "family", "state", "tries", "content"):
        table.add_column(name, justify="right" if name in ("entry", "tries") else "left")
    for entry in entries:
        mark = " (final)" if entry.is_final else ""
        table.add_row(
            str(entry.entry_id),
            Text(entry.team),
            Text(entry.name + mark),
            Text(entry.family),
            Text(entry.state),
            str(entry.attempts + entry.takeovers),
            entry.content_sha256[:8],
        )
    console.print(table)
    for entry in entries:
        if entry.reason:
            say(f"entry {entry.entry_id}: {entry.reason}")
    counts = {state: sum(1 for e in entries if e.state == state) for state in _states(entries)}
    parts = [f"{number} {state}" for state, number in counts.items()]
    say(f"{place.path}: {', '.join(parts) or 'nothing entered yet'}")


@app.command("publish")
def publish(
    out: Annotated[Path, typer.Option("--out", help="The public folder; an earlier one goes.")],
    home: _Home = _DEFAULT_HOME,
    queue: _Queue = None,
) -> None:
    """Write signed results and reports for the public."""
    from paceline.judge import publish_results, read_ledger

    place, opened = _open(home, queue, None)
    num = publish_results(place, read_ledger(opened), out)
    say(f"{out}: {num} measured {'entry' if num == 1 else 'entries'}, signed")
    say(f"next: paceline leaderboard {out} --rules RULES --out SITE")


@app.command("verify")
def verify(
    results: Annotated[Path, typer.Argument(help="results.jsonl or a published folder.")],
    key: Annotated[
        Path | None, typer.Option("--key", help="The judge's key, to check signatures too.")
    ] = None,
) -> None:
    """Check that no published result was changed, left out or put in."""
    from paceline.judge import verify_results

    found = verify_results(results, key_path=key)
    say(
        f"{results}: {plural(found['num_lines'], 'line')} in one chain, "
        f"{plural(found['num_results'], 'result')} as signed; signatures {found['signatures']}"
    )


def _states(entries: object) -> list[str]:
    from paceline.judge.queue import STATES

    present = {entry.state for entry in entries}  # type: ignore[attr-defined]
    return [state for state in STATES if state in present]


def _open(home: Path, url: str | None, rules: Rules | None) -> tuple[Home, Queue]:
    """The judge's folder and queue. Without rules it must be there already."""
    from paceline.errors import ResultError
    from paceline.judge import Home, open_queue, pin_setting

    if rules is None and not home.is_dir():
        raise ResultError(
            "there is no judge",
            where=str(home),
            expected="the --home that `paceline judge add` was given",
        )
    opened = open_queue(home, url)
    if rules is not None:
        pin_setting(opened, "rules", rules.sha256, what="rules")
    return Home(path=home), opened


def _fetch(source: str, fetched: Path, max_bytes: int) -> Path:
    """A repository of the Hub comes to `fetched`; what a killed command got of it is used."""
    from paceline.draft import resolve_draft
    from paceline.hub import fetch_folder, is_hub_spec, parse_ref
    from paceline.records import clear_folder

    if not is_hub_spec(source) or Path(source).exists():
        return resolve_draft(source)
    ref = parse_ref(source)
    say(f"fetching {source} ...")
    folder = fetched / ref.repo_id.replace("/", "--") / ref.commit
    clear_folder(folder)
    fetch_folder(ref, folder, kind="draft", max_bytes=max_bytes)
    return folder
