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
    from paceline.quantize import Reshape
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
    """All rows of a folder, those to calibrate on, their file, and what a record says of them."""

    all: Sequence[Row] = ()
    chosen: Sequence[Row] = ()
    where: str = ""
    told: dict[str, Any] | None = None


def _read_rows(calibrate: Calibrate, target: TargetFacts) -> _Rows:
    """Checked before anything is loaded."""
    from paceline.data import read_data_record, read_rows
    from paceline.quantize import check_rows, choose_rows

    if calibrate.data is None:
        return _Rows()
    record = read_data_record(calibrate.data)
    where = str(calibrate.data / "rows.jsonl")
    rows = read_rows(calibrate.data)
    check_rows(rows, target, where=where, made_for=record["target"])
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
    return _Rows(all=rows, chosen=chosen, where=where, told=told)


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
                        device=calibrate.device or "cpu",
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
    calibrate: Calibrate,
) -> TargetFacts:
    """Writes the quantised target. recurrent: a scheme's name, "keep", or None for the default."""
    from paceline.quantize import choose_scheme, plan_target, quantize_target

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
    rows = _read_rows(calibrate, target)
    before = sum((target.path / file).stat().st_size for file in set(plan.files.values()))
    with progress("layers") as show:
        done = quantize_target(
            plan,
            out,
            replace=True,
            rows=rows.chosen,
            where=rows.where,
            calibrated_on=rows.told,
            device=calibrate.device or "cpu",
            on_layer=show,
        )
    after = sum(path.stat().st_size for path in done.path.glob("*.safetensors"))
    say(f"{len(plan.schemes)} matrices quantised, {len(plan.kept)} kept")
    say(f"target: {out} ({before / 1e6:.1f} MB before, {after / 1e6:.1f} MB now)")
    return done
