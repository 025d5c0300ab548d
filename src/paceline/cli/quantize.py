"""paceline quantize: a draft or a target made smaller, and for a draft what that cost."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.disk import require_room
from paceline.data import Thinking
from paceline.errors import MissingExtraError, PlanError

if TYPE_CHECKING:
    from paceline.draft import Scheme

__all__ = ["quantize"]

_TARGET_ONLY = ("recurrent", "edges", "distill")
_DRAFT_ONLY = ("keep", "window", "vocab", "share_head")
_PACKAGES = ("torch", "transformers", "safetensors")
# what has an effect only beside something else
_NEEDS = {
    "measure": ("max_loss", "prompts", "rules", "max_tokens", "thinking"),
    "scheme": ("group_size", "head", "keep"),
    "data": ("rows", "max_length", "distill"),
}


def quantize(
    model: Annotated[
        str, typer.Argument(help="A draft (with --target), or without --target a target.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Where the smaller folder goes.")],
    target: Annotated[
        str | None, typer.Option("--target", help="The target that the draft is for.")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="w4a16, w8a16, w8a8 or fp8.")
    ] = None,
    method: Annotated[str, typer.Option("--method", help="gptq, rtn; for targets awq too.")] = (
        "gptq"
    ),
    group_size: Annotated[
        int | None, typer.Option("--group-size", min=0, help="Weights a scale; 0 is a whole row.")
    ] = None,
    head: Annotated[
        str | None, typer.Option("--head", help="Scheme of the output layer; else it is kept.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="A data folder, to calibrate on.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Rows to calibrate on; 64.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=16, help="Longer rows are left out; 512.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="Draft: a matrix to keep, such as fc.")
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=1, help="Draft: tokens its attention looks back.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", min=1, help="Draft: most frequent tokens to keep.")
    ] = None,
    share_head: Annotated[
        bool, typer.Option("--share-head", help="Draft: the target's output layer for its own.")
    ] = False,
    recurrent: Annotated[
        str | None, typer.Option("--recurrent", help="Target: scheme of Gated-DeltaNet layers.")
    ] = None,
    edges: Annotated[
        int | None, typer.Option("--edges", min=0, help="Target: layers kept at each end; 1.")
    ] = None,
    distill: Annotated[
        int | None,
        typer.Option("--distill", min=1, help="Target: train the codes for so many steps."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Serve both, print what it cost.")
    ] = False,
    max_loss: Annotated[
        str | None,
        typer.Option("--max-loss", help="With --measure: the loss that is allowed, as 2%."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", help="With --measure: a JSONL file or a set; held-out."),
    ] = None,
    rules: Annotated[
        str | None, typer.Option("--rules", help="With --measure: rules; emc2-2027.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=2, help="With --measure: longest answer.")
    ] = None,
    thinking: Annotated[
        Thinking | None, typer.Option("--thinking", help="With --measure: on or off.")
    ] = None,
) -> int:
    """Make a draft or a target smaller, and say what it cost.

    With --distill the rounded codes are trained to the target's own logits on the same grid; rows
    that were held out decide whether the result is taken.
    With --measure both are served, one beside the other, and the original is kept (exit code 1)
    where a draft's acceptance fell, or a target's perplexity rose, by more than --max-loss.
    """
    given = {k: v for k, v in locals().items() if v not in (None, False)}
    _require_fitting(given, is_draft=target is not None)
    _require_packages()
    from paceline.cli.quantize_measure import measure_price, measure_target_price
    from paceline.cli.quantize_run import Calibrate, make_draft, make_target
    from paceline.quantize import Reshape, choose_scheme, parse_share
    from paceline.target import read_target

    limit = None if max_loss is None else parse_share(max_loss)
    chosen = None if scheme is None else choose_scheme(scheme, group_size)
    facts = read_target(model if target is None else target)
    _require_new(out)
    calibrate = Calibrate(
        data=data, num_rows=rows or 64, max_length=max_length or 512, device=device
    )
    place = out.with_name(f"{out.name}.candidate") if measure else out
    measured: dict[str, Any] = {
        "limit": limit,
        "prompts": prompts or "held-out",
        "rules_name": rules or "emc2-2027",
        "max_tokens": max_tokens,
        "device": device,
        "thinking": thinking or "none",
    }
    if measure and chosen is not None:
        require_kernel(chosen, device)
    if target is None:
        assert chosen is not None
        done = make_target(
            facts,
            place,
            scheme=chosen,
            method=method,
            head=None if head is None else choose_scheme(head),
            recurrent=recurrent,
            num_edge_layers=1 if edges is None else edges,
            num_distill_steps=distill,
            calibrate=calibrate,
        )
        return measure_target_price(facts, done, out, **measured) if measure else 0
    if head not in (None, scheme):
        raise PlanError(
            f"--head {head} beside --scheme {scheme}",
            expected="the same scheme: a draft has one for all of its matrices",
        )
    draft, before = make_draft(
        model,
        facts,
        place,
        scheme=None if chosen is None else dataclasses.replace(chosen, has_head=head is not None),
        method=method,
        keep=keep or [],
        change=Reshape(window=window, shares_head=share_head),
        vocab=vocab,
        calibrate=calibrate,
    )
    return measure_price(before, draft, facts, out, **measured) if measure else 0


def _require_fitting(given: dict[str, Any], *, is_draft: bool) -> None:
    """Raises PlanError for options that have no effect together."""
    for name in _TARGET_ONLY if is_draft else _DRAFT_ONLY:
        if name in given:
            raise PlanError(
                f"{_option(name)} has no effect on a {'draft' if is_draft else 'target'}",
                fix="Leave it out." if is_draft else "Leave it out, or name the draft's --target.",
            )
    for needed, names in _NEEDS.items():
        for name in names:
            if name in given and needed not in given:
                raise PlanError(
                    f"{_option(name)} has no effect without {_option(needed)}",
                    fix=f"Give {_option(needed)} too, or leave it out.",
                )
    changes = [name for name in ("scheme", "window", "vocab", "share_head") if name in given]
    if not changes:
        raise PlanError(
            "nothing to do", expected="--scheme, or for a draft --window, --vocab or --share-head"
        )


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"quantising needs {' and '.join(missing)}", fix="pip install 'paceline[train]'"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require_new(out: Path) -> None:
    """Raises before any work: the name is taken, or the disk is full."""
    if out.exists():
        raise PlanError("is there already", where=str(out), expected="the name of a new folder")
    require_room(out)


def require_kernel(scheme: Scheme, device: str | None) -> None:
    """Raises PlanError where the measurement could not start."""
    from paceline.draft import find_cpu_kernel
    from paceline.serve.install import find_device

    if (device or find_device()) == "cpu" and find_cpu_kernel(scheme) is None:
        raise PlanError(
            "vLLM 0.31.0's CPU build has no kernel for w8a16: it cannot be measured here",
            where="--measure",
            fix="Measure on a GPU, leave --measure out, or take w8a8.",
        )
