"""What `paceline quantize` does: rows read and checked, a draft or a target made smaller."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.console import plural, progress, say
from paceline.errors import PlanError

if TYPE_CHECKING:
    from paceline.data import Row
    from paceline.draft import Draft, Scheme
    from paceline.quantize import Reshape, TargetPlan
    from paceline.quantize.target_layer import Quantized
    from paceline.target import TargetFacts

__all__ = ["Calibrate", "make_draft", "make_target"]


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """data: a data folder, or None. num_rows of at most max_length tokens are taken from it."""

    data: Path | None
    num_rows: int
    max_length: int
    device: str | None


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """All rows to learn from, those to calibrate on, those that judge, their file, and what a
    record says of them."""

    all: Sequence[Row] = ()
    chosen: Sequence[Row] = ()
    held_out: Sequence[Row] = ()
    where: str = ""
    told: dict[str, Any] | None = None


def _read_rows(calibrate: Calibrate, target: TargetFacts, *, holds_out: bool = False) -> _Rows:
    """Checked before anything is loaded. holds_out: keeps rows to judge by out of the others."""
    from paceline.data import read_data_record, read_rows
    from paceline.quantize import check_rows, choose_rows, hold_out_rows

    if calibrate.data is None:
        return _Rows()
    record = read_data_record(calibrate.data)
    where = str(calibrate.data / "rows.jsonl")
    rows = read_rows(calibrate.data)
    check_rows(rows, target, where=where, made_for=record["target"])
    held_out: Sequence[Row] = ()
    if holds_out:
        rows, held_out = hold_out_rows(rows, calibrate.max_length)
    chosen = choose_rows(rows, calibrate.num_rows, calibrate.max_length)
    cut = sum(row.finish_reason == "length" for row in chosen)
    told = {
        "rows_sha256": record["rows_sha256"],
        "num_rows": len(chosen),
        "num_answers_at_their_limit": cut,
        "max_length": calibrate.max_length,
        "thinking": record["thinking"],
    }
    say(f"calibrating on {plural(len(chosen), 'row')} of {where}")
    return _Rows(all=rows, chosen=chosen, held_out=held_out, where=where, told=told)


def make_draft(
    name: str,
    target: TargetFacts,
    out: Path,
    *,
    scheme: Scheme | None,
    method: str,
    keep: Sequence[str],
    change: Reshape,
    vocab: int | None,
    calibrate: Calibrate,
) -> tuple[Draft, Draft]:
    """(the new draft in `out`, the original). Everything is checked before the target is loaded."""
    from paceline.draft import NATIVE, read_draft, read_native_draft, resolve_draft
    from paceline.quantize import plan_draft, quantize_draft
    from paceline.train import open_draft_run

    before = draft = (
        read_native_draft(target, num_speculative_tokens=1)
        if name == NATIVE
        else read_draft(resolve_draft(name))
    )
    if vocab is not None and calibrate.data is None:
        raise PlanError("--vocab needs the target's answers to count", where="--data")
    rows = _read_rows(calibrate, target)
    with tempfile.TemporaryDirectory(prefix="paceline-quantize-") as scratch:
        if vocab is not None or change.window is not None or change.shares_head:
            place = out if scheme is None else Path(scratch) / "reshaped"
            draft = _reshape(draft, target, change, vocab, rows, place)
        if scheme is not None:
            plan = plan_draft(draft, scheme, method=method, keep=keep)
            run = None
            if rows.chosen:
                with progress("target") as show:
                    run = open_draft_run(
                        draft,
                        target,
                        rows.chosen,
                        where=rows.where,
                        device=_find_device(calibrate.device),
                        on_row=show,
                    )
            with progress("quantising") as show:
                draft = quantize_draft(
                    plan,
                    out,
                    calibration=run,
                    calibrated_on=rows.told,
                    where=rows.where,
                    replace=True,
                    on_stage=show,
                )
    _tell(before, draft)
    return draft, before


def _reshape(
    draft: Draft,
    target: TargetFacts,
    change: Reshape,
    vocab: int | None,
    rows: _Rows,
    place: Path,
) -> Draft:
    from paceline.quantize import choose_tokens, count_tokens, read_vocabulary, reshape_draft

    coverage = None
    if vocab is not None:
        counts, allowed = count_tokens(rows.all), read_vocabulary(draft)
        tokens, coverage = choose_tokens(counts, vocab, target=target, allowed=allowed)
        change = dataclasses.replace(change, tokens=tokens)
        shares = ", ".join(f"{key} {share:.1%}" for key, share in coverage.items())
        say(f"vocabulary of {vocab:,}; answer tokens inside: {shares}")
    return reshape_draft(draft, target, change, place, coverage=coverage, replace=True)


def _tell(before: Draft, after: Draft) -> None:
    modules = (after.metadata.get("quantized") or {}).get("modules") or {}
    errors = {name: told["output_error"] for name, told in modules.items()}
    known = {name: error for name, error in errors.items() if error is not None}
    if known:
        worst = max(known, key=known.__getitem__)
        say(f"largest output error: {known[worst]:.3%}, of {worst}")
    sizes = f"{before.files_bytes / 1e6:.2f} MB before, {after.files_bytes / 1e6:.2f} MB now"
    say(f"draft: {after.path} ({sizes})")


def make_target(
    target: TargetFacts,
    out: Path,
    *,
    scheme: Scheme,
    method: str,
    head: Scheme | None,
    recurrent: str | None,
    num_edge_layers: int,
    num_distill_steps: int | None,
    calibrate: Calibrate,
) -> TargetFacts:
    """Writes the quantised target. recurrent: a scheme's name, "keep", or None for the default.

    num_distill_steps: of training on the fixed grid; None rounds only.
    """
    from paceline.quantize import choose_scheme, plan_target, round_target, write_target

    chosen = None
    if recurrent is None and target.is_hybrid:
        # 4 bits break a recurrent layer sooner than any other; 8 do not
        chosen = choose_scheme("w8a8") if scheme.num_bits == 4 else scheme
        say(f"recurrent layers: {'w8a8' if scheme.num_bits == 4 else 'like the others'}")
    elif recurrent not in (None, "keep"):
        chosen = choose_scheme(str(recurrent))
    plan = plan_target(
        target,
        scheme,
        method=method,
        recurrent=chosen,
        head=head,
        num_edge_layers=num_edge_layers,
    )
    if num_distill_steps is not None:
        from paceline.quantize import require_distillable

        require_distillable(plan)
    rows = _read_rows(calibrate, target, holds_out=num_distill_steps is not None)
    before = sum((target.path / file).stat().st_size for file in set(plan.files.values()))
    with progress("layers") as show:
        made = round_target(
            plan,
            out,
            rows=rows.chosen,
            where=rows.where,
            device=_find_device(calibrate.device),
            on_layer=show,
        )
    distilled = None
    if num_distill_steps is not None:
        made, distilled = _distill(
            plan, made, rows, num_distill_steps, _find_device(calibrate.device)
        )
    done = write_target(plan, made, out, calibrated_on=rows.told, distilled=distilled, replace=True)
    after = sum(path.stat().st_size for path in done.path.glob("*.safetensors"))
    say(f"{len(plan.schemes)} matrices quantised, {len(plan.kept)} kept")
    say(f"target: {out} ({before / 1e6:.1f} MB before, {after / 1e6:.1f} MB now)")
    return done


def _distill(
    plan: TargetPlan, made: Quantized, rows: _Rows, num_steps: int, device: str
) -> tuple[Quantized, dict[str, Any]]:
    from paceline.quantize import Distillation, distill_target

    how = Distillation(rows=rows.all, held_out=rows.held_out, num_steps=num_steps)
    with progress("distilling") as show:
        better, told = distill_target(
            plan, made, how, where=rows.where, device=device, on_step=show
        )
    interval = (
        ""
        if told["change_low"] is None
        else f", 95 % {told['change_low']:+.5f} to {told['change_high']:+.5f}"
    )
    say(
        f"KL to the target on {plural(len(rows.held_out), 'held-out row')}:"
        f" {told['kl_before']:.5f} before, {told['kl_after']:.5f} after, in nats a token"
        f" ({told['change']:+.5f}{interval}); {told['codes_moved']:.2%} of the codes moved"
    )
    if not told["kept"]:
        say("that is no improvement beyond chance: the rounded codes are kept")
    return better, told


def _find_device(device: str | None) -> str:
    from paceline.train.ranks import find_device

    return str(find_device(device))
