"""paceline train: rows of the target's own answers in, a draft folder out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import console, progress, say
from paceline.cli.disk import require_room
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.draft import Draft
    from paceline.target import TargetFacts
    from paceline.train import Recipe

__all__ = ["require_clean", "run_training", "train"]

_HELD_OUT = "held-out"
_COPY_SHARE = 0.5
_NUM_NAMED = 5


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
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=1, help="Processes here, one a GPU.")
    ] = 1,
    nnodes: Annotated[
        int, typer.Option("--nnodes", min=1, help="Machines that run this command.")
    ] = 1,
    meet_at: Annotated[
        str | None, typer.Option("--meet-at", help="HOST:PORT on the first of several machines.")
    ] = None,
    sharded_target: Annotated[
        bool,
        typer.Option("--sharded-target", help="Spread the target over the processes, too."),
    ] = False,
    states: Annotated[
        Path | None,
        typer.Option("--states", help="Read the target's states there (paceline data states)."),
    ] = None,
) -> None:
    """Train a draft for a target."""
    from paceline.target import read_target
    from paceline.train import launch_training, read_recipe, require_free, world_size

    if world_size() == 1:
        require_free(out, resume=resume)
    if world_size() == 1 and (nproc_per_node, nnodes, meet_at) != (1, 1, None):
        require_clean(data, read_target(target))
        read_recipe(recipe)
        words = ["train", recipe, "--target", target, "--data", data, "--out", out]
        words += ["--device", device] if device else []
        words += ["--states", states] if states else []
        words += [word for word, on in (("--resume", resume),) if on]
        words += [word for word, on in (("--sharded-target", sharded_target),) if on]
        code = launch_training(
            [str(word) for word in words],
            num_processes=nproc_per_node,
            num_machines=nnodes,
            meet_at=meet_at,
            device=device,
        )
        raise typer.Exit(code)
    run_training(
        read_recipe(recipe),
        read_target(target),
        data,
        out,
        device,
        resume,
        sharded_target,
        states=states,
    )


def run_training(
    recipe: Recipe,
    target: TargetFacts,
    data: Path,
    out: Path,
    device: str | None,
    resume: bool,
    sharded_target: bool = False,
    *,
    states: Path | None = None,
) -> Draft:
    """Trains with a progress display; shared with `paceline demo`."""
    from paceline.train import current_rank, train_draft

    if current_rank():  # one process of several speaks
        console.quiet = True
    else:
        require_clean(data, target)
        require_room(out)
    try:
        with progress("training") as show:
            draft = train_draft(
                recipe,
                target=target,
                data_dir=data,
                out_dir=out,
                device=device,
                resume=resume,
                sharded_target=sharded_target,
                states_dir=states,
                on_progress=lambda p: show(p.step, p.num_steps, describe_progress(p)),
            )
    except KeyboardInterrupt:
        raise _stopped(out) from None
    say(f"draft: {out} ({draft.num_parameters / 1e6:.2f} M parameters)")
    return draft


def require_clean(data: Path, target: TargetFacts) -> None:
    """Raises DataError when rows copy prompts that drafts are measured on."""
    from paceline.data import contamination, read_data_record, read_prompts, read_rows
    from paceline.errors import DataError

    read_data_record(data)
    held_out = read_prompts(_HELD_OUT).prompts
    copies = contamination(read_rows(data), held_out, target=target, min_share=_COPY_SHARE)
    if copies:
        named = [f"row '{c.training_id}' has '{c.held_out_id}'" for c in copies[:_NUM_NAMED]]
        more = f" and {len(copies) - _NUM_NAMED} more" if len(copies) > _NUM_NAMED else ""
        raise DataError(
            f"training rows copy prompts of the measured set {_HELD_OUT}: {', '.join(named)}{more}",
            where=str(data),
            expected="other prompts: a draft that has seen the test says nothing",
            fix="Take these rows out and answer the rest into a new folder.",
        )


def _stopped(out: Path) -> PacelineError:
    kept = out.with_name(out.name + ".checkpoint")
    if kept.is_dir():
        return PacelineError(
            "training was stopped; its last state is kept",
            where=str(kept),
            fix="Go on with the same command and --resume.",
            exit_code=130,
        )
    return PacelineError("training was stopped before its first step", exit_code=130)


def describe_progress(state: object) -> str:
    """One line: loss, accuracy of each unroll position, speed."""
    shares = getattr(state, "position_accuracy", ())
    accuracy = " ".join("-" if share is None else f"{share:.2f}" for share in shares)
    return (
        f"loss {getattr(state, 'loss', 0.0):.3f}"
        f"  accuracy {accuracy}  {getattr(state, 'tokens_per_s', 0.0):,.0f} tokens/s"
    )
