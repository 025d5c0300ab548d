"""paceline data: prompts answered by the target itself, and a look at what is trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import console, plural, progress, say
from paceline.data import Thinking

if TYPE_CHECKING:
    from paceline.data import Answering
    from paceline.target import TargetFacts

__all__ = ["app"]

THINKING_HELP = "on or off where the target's template has a switch."
app = typer.Typer(help="Make training data and look at it.", no_args_is_help=True)


@app.command("answer")
def answer(
    prompts: Annotated[
        str, typer.Option("--prompts", help="A JSONL file or a bundled set, e.g. train:500.")
    ],
    target: Annotated[str, typer.Option("--target", help="A folder or a bundled name.")],
    out: Annotated[Path, typer.Option("--out", help="The data folder; an unfinished one goes on.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of sampling; greedy needs none.")] = 0,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Prompts answered at once.")
    ] = 32,
    thinking: Annotated[Thinking, typer.Option("--thinking", help=THINKING_HELP)] = "none",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
    data_parallel: Annotated[
        int, typer.Option("--data-parallel", min=1, help="Engines at once, one a GPU.")
    ] = 1,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", help="URL of an OpenAI-compatible server; several share."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The target's name there, if it serves several.")
    ] = None,
) -> None:
    """Let the target answer prompts for a draft to learn from."""
    from paceline.data import answer_prompts, open_tokenizer, read_prompts, require_few_rejected
    from paceline.endpoint import Sampling
    from paceline.serve import require_places, start_ahead
    from paceline.target import read_target

    _require_effect(bool(server), device, data_parallel, model)
    prompt_set = read_prompts(prompts)
    require_few_rejected(prompt_set)
    facts = read_target(target)
    if not server:
        require_places(data_parallel, device)
        start_ahead(device, num_engines=data_parallel)
    open_tokenizer(facts, thinking=thinking)  # a wrong mode is told before an engine starts
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with (
        _open(facts, out, concurrency, device, data_parallel, server or [], model) as endpoint,
        progress("answering") as show,
    ):
        record = answer_prompts(
            prompt_set,
            endpoint,
            facts,
            out_dir=out,
            sampling=sampling,
            concurrency=concurrency,
            thinking=thinking,
            on_progress=show,
        )
    print_record(out, record)


@contextlib.contextmanager
def _open(
    target: TargetFacts,
    out: Path,
    concurrency: int,
    device: str | None,
    num_engines: int,
    servers: list[str],
    model: str | None,
) -> Iterator[Answering]:
    """Engines of our own, or somebody's servers. concurrency: of all together."""
    from paceline.cli.arms import start_targets
    from paceline.data import DataParallel, open_servers

    if servers:
        yield open_servers(servers, target, model=model)
        return
    each = -(-concurrency // num_engines)
    with start_targets(target, out, num=num_engines, max_num_seqs=each, device=device) as engines:
        yield engines[0] if num_engines == 1 else DataParallel(engines)


def _require_effect(
    is_served: bool, device: str | None, num_engines: int, model: str | None
) -> None:
    from paceline.errors import PlanError

    if not is_served and model is not None:
        raise PlanError("--model has no effect without --server", fix="Leave it out.")
    if is_served and device is not None:
        raise PlanError("--device has no effect with --server", fix="Leave it out.")
    if is_served and num_engines > 1:
        raise PlanError(
            "--data-parallel has no effect with --server",
            fix="Name each server with a --server of its own.",
        )


@app.command("tokenize")
def tokenize(
    conversations: Annotated[Path, typer.Argument(help="JSONL with assistant turns.")],
    target: Annotated[str, typer.Option("--target", help="A folder or a bundled name.")],
    out: Annotated[Path, typer.Option("--out", help="The data folder to write.")],
    thinking: Annotated[Thinking, typer.Option("--thinking", help=THINKING_HELP)] = "none",
) -> None:
    """Turn finished conversations into training rows."""
    from paceline.data import read_prompts, rows_from_conversations
    from paceline.target import read_target

    prompt_set = read_prompts(str(conversations))
    record = rows_from_conversations(prompt_set, read_target(target), out, thinking=thinking)
    print_record(out, record)


@app.command("states")
def states(
    data: Annotated[Path, typer.Argument(help="A data folder.")],
    target: Annotated[str, typer.Option("--target", help="The target whose states they are.")],
    out: Annotated[Path, typer.Option("--out", help="The folder; an unfinished one goes on.")],
    layers: Annotated[
        str, typer.Option("--layers", help="Layers that the draft reads, as 2,15,27.")
    ] = "",
    max_length: Annotated[
        int, typer.Option("--max-length", min=4, help="Tokens of a row, as the recipe's.")
    ] = 2048,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
) -> None:
    """Store the target's states over the rows, to train from.

    Prints what they take on the disk first, and refuses what does not fit.
    """
    from paceline.data import StatesPlan
    from paceline.errors import DataError
    from paceline.target import read_target
    from paceline.train import store_states

    if dtype not in ("bfloat16", "float32"):
        raise DataError(f"--dtype is {dtype!r}", expected="bfloat16 or float32")
    words = [word.strip() for word in layers.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        raise DataError(f"--layers is {layers!r}", expected="layer numbers, as 2,15,27")

    def tell(plan: StatesPlan, to_come: int) -> None:
        say(
            f"states: {sum(plan.lengths):,} tokens of {plan.bytes_per_token:,} bytes, "
            f"{plan.num_bytes / 1e9:,.2f} GB in {plural(len(plan.files), 'file')}; "
            f"{to_come / 1e9:,.2f} GB to come"
        )

    with progress("storing") as show_progress:
        store_states(
            data,
            target=read_target(target),
            out_dir=out,
            aux_layer_ids=[int(word) for word in words],
            dtype=dtype,
            max_length=max_length,
            device=device,
            on_plan=tell,
            on_progress=show_progress,
        )
    say(f"states: {out}")


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


@app.command("vocabulary")
def vocabulary(
    data: Annotated[Path, typer.Argument(help="A data folder.")],
    target: Annotated[str, typer.Option("--target", help="The target whose tokens they are.")],
) -> None:
    """Print how much of the answers each draft vocabulary can say."""
    from rich import box
    from rich.table import Table

    from paceline.data import read_data_record, read_rows
    from paceline.target import read_target
    from paceline.train import count_supervised, measure_coverage, special_tokens

    read_data_record(data)
    rows, facts = read_rows(data), read_target(target)
    always = special_tokens(facts)
    sizes = [size for size in (2**n for n in range(9, 18)) if len(always) < size < facts.vocab_size]
    found = measure_coverage(rows, sizes, vocab_size=facts.vocab_size, always=always)
    counts = count_supervised(rows)
    say(
        f"{len(counts):,} of {facts.vocab_size:,} tokens stand in {plural(len(rows), 'row')}; "
        "vocabularies chosen by four rows of five, measured on the fifth ones"
    )
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("% of tokens said")
    for row in found:
        table.add_column(f"{row.size:,}", justify="right")
    sizes_mb = (row.size * facts.hidden_size * 2 / 1e6 for row in found)
    table.add_row("head, MB", *(f"{size:.1f}" for size in sizes_mb))
    table.add_row("all", *(f"{100 * row.total:.1f}" for row in found))
    for name in found[0].by_category:
        shares = (row.by_category[name] for row in found)
        table.add_row(name, *("-" if s is None else f"{100 * s:.1f}" for s in shares))
    console.print(table)


def print_record(out: Path, record: Mapping[str, Any]) -> None:
    """Every rejected line with its reason, then what the data folder holds, in one sentence."""
    rejected = record["rejected"]
    for item in rejected:
        name = f" ({item['id']})" if item["id"] is not None else ""
        say(f"  line {item['line']}{name} rejected: {item['reason']}")
    counts = record["counts"]
    cut = counts["finish_reasons"].get("length", 0)
    say(
        f"data: {out}: {plural(counts['rows'], 'row')}, {len(rejected):,} rejected; "
        f"{counts['supervised_tokens']:,} of {plural(counts['tokens'], 'token')} supervised"
        + (f"; {plural(cut, 'answer')} cut by the token limit" if cut else "")
    )
