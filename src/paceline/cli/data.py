"""paceline data: prompts answered by the target itself, and a look at what is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import console, progress, say

__all__ = ["app"]

app = typer.Typer(help="Make and look at training data.", no_args_is_help=True)


@app.command("answer")
def answer(
    prompts: Annotated[
        str, typer.Option("--prompts", help="A JSONL file or a bundled set, e.g. train:500.")
    ],
    target: Annotated[str, typer.Option("--target", help="A folder or a bundled name.")],
    out: Annotated[Path, typer.Option("--out", help="The data folder; an unfinished one goes on.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1)] = 32,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.")] = None,
) -> None:
    """Let the target answer prompts; its answers are what a draft learns from."""
    from paceline.cli.arms import start_target
    from paceline.data import answer_prompts, read_prompts
    from paceline.endpoint import Sampling
    from paceline.target import read_target

    prompt_set = read_prompts(prompts)
    print_rejected(prompt_set.rejected)
    facts = read_target(target)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with (
        start_target(facts, out, max_num_seqs=concurrency, device=device) as endpoint,
        progress("answering") as show,
    ):
        record = answer_prompts(
            prompt_set,
            endpoint,
            facts,
            out_dir=out,
            sampling=sampling,
            concurrency=concurrency,
            on_progress=show,
        )
    say(f"data: {out} ({record['counts']})")


@app.command("tokenize")
def tokenize(
    conversations: Annotated[Path, typer.Argument(help="JSONL with assistant turns.")],
    target: Annotated[str, typer.Option("--target", help="A folder or a bundled name.")],
    out: Annotated[Path, typer.Option("--out", help="The data folder to write.")],
) -> None:
    """Turn finished conversations into token rows with a mask over assistant turns."""
    from paceline.data import read_prompts, rows_from_conversations
    from paceline.target import read_target

    prompt_set = read_prompts(str(conversations))
    print_rejected(prompt_set.rejected)
    record = rows_from_conversations(prompt_set, read_target(target), out)
    print_rejected([(row["line"], row["reason"]) for row in record.get("rejected", [])])
    say(f"data: {out} ({record['counts']})")


@app.command("show")
def show(
    data: Annotated[Path, typer.Argument(help="A data folder.")],
    target: Annotated[str, typer.Option("--target", help="The target whose tokenizer reads it.")],
    num_rows: Annotated[int, typer.Option("--rows", min=1, help="How many rows.")] = 3,
) -> None:
    """Print rows with the supervised tokens marked."""
    from paceline.data import show_rows
    from paceline.target import read_target

    console.print(show_rows(data, read_target(target), num_rows=num_rows), markup=False)


def print_rejected(rejected: Sequence[tuple[int, str]]) -> None:
    """Every rejected row with its line and reason, and the count."""
    for line, reason in rejected:
        say(f"  line {line}: rejected: {reason}")
    if rejected:
        say(f"  {len(rejected)} rows rejected")
