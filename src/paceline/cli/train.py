"""paceline train: rows of the target's own answers in, a draft folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import progress, say

__all__ = ["train"]


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    target: Annotated[str, typer.Option("--target", help="A folder or a bundled name.")],
    data: Annotated[Path, typer.Option("--data", help="A data folder (paceline data answer).")],
    out: Annotated[Path, typer.Option("--out", help="Where the draft folder goes.")],
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint beside --out.")
    ] = False,
) -> None:
    """Train a draft for a target."""
    from paceline.target import read_target
    from paceline.train import read_recipe

    run_training(read_recipe(recipe), read_target(target), data, out, device, resume)


def run_training(
    recipe: object, target: object, data: Path, out: Path, device: str | None, resume: bool
) -> object:
    """Trains with a progress display; shared with `paceline demo`."""
    from paceline.train import train_draft

    with progress("training") as show:
        draft = train_draft(
            recipe,  # type: ignore[arg-type]
            target=target,  # type: ignore[arg-type]
            data_dir=data,
            out_dir=out,
            device=device,
            resume=resume,
            on_progress=lambda p: show(p.step, p.num_steps, describe_progress(p)),
        )
    say(f"draft: {out} ({draft.num_parameters / 1e6:.2f} M parameters)")
    return draft


def describe_progress(state: object) -> str:
    """One line: loss, accuracy of each unroll position, speed."""
    accuracy = " ".join(f"{a:.2f}" for a in getattr(state, "position_accuracy", ()))
    return (
        f"loss {getattr(state, 'loss', 0.0):.3f}"
        f"  accuracy {accuracy}  {getattr(state, 'tokens_per_s', 0.0):,.0f} tokens/s"
    )
