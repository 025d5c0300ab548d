"""What a layer's own inputs say: second moments, gathered row by row; and rows fit for that.

Rows are checked before any work starts, inputs as they come: a message names file, row and reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paceline.errors import DataError
from paceline.target import TargetFacts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Calibration",
    "CalibrationRow",
    "Moments",
    "check_rows",
    "choose_rows",
    "hold_out_rows",
]


class CalibrationRow(Protocol):
    """One row of a data folder (`paceline.data.Row` is one)."""

    @property
    def row_id(self) -> str: ...
    @property
    def input_ids(self) -> Sequence[int]: ...
    @property
    def loss_spans(self) -> Sequence[tuple[int, int]]: ...
    @property
    def finish_reason(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=CalibrationRow)

_HELD_OUT = 8  # one row in so many
_FEWEST, _MOST = 8, 64


class Calibration(Protocol):
    """A draft at work: `paceline.train.open_draft_run` gives one."""

    def observe(
        self, seen: Callable[[str, str, Tensor], None], weights: Mapping[str, Tensor]
    ) -> None:
        """Calls seen(row id, module, inputs [N, C]) for every matrix; weights stand in from now."""


def check_rows(
    rows: Sequence[CalibrationRow],
    target: TargetFacts,
    *,
    where: str,
    made_for: Mapping[str, Any] | None,
) -> None:
    """Raises DataError for rows of another vocabulary, without an answer, or cut by accident.

    where: the rows' file. made_for: the target that data.json names, None where nothing is known.
    An answer that reached the limit of its length ("length") is fit; one that is said to have ended
    by itself and lacks its end token was cut after it was written.
    """
    if not rows:
        raise DataError("there is no row to calibrate on", where=where)
    stated = (made_for or {}).get("tokenizer_sha256")
    if stated is not None and target.tokenizer_sha256 not in (None, stated):
        raise DataError(
            f"the rows hold ids of another tokenizer ({str(stated)[:12]})",
            where=where,
            expected=f"{target.name}'s ({str(target.tokenizer_sha256)[:12]})",
            fix="Answer the prompts with this target: paceline data answer.",
        )
    for number, row in enumerate(rows, 1):
        place = f"{where}:{number}"
        top = max(row.input_ids)
        if top >= target.vocab_size:
            raise DataError(
                f"row '{row.row_id}' holds token {top}; {target.name} has {target.vocab_size}",
                where=place,
                fix="The rows were made for another vocabulary: answer the prompts again.",
            )
        if not any(end - start >= 2 and end > 2 for start, end in row.loss_spans):
            raise DataError(
                f"row '{row.row_id}' has no answer of two tokens: everything in it is masked",
                where=place,
                expected="a loss span of two tokens or more",
                fix="Leave the row out.",
            )
        last = row.input_ids[row.loss_spans[-1][1] - 1]
        ends = target.eos_token_ids
        if row.finish_reason == "stop" and ends and last not in ends:
            raise DataError(
                f"the answer of row '{row.row_id}' is cut: it ended by itself, but its last token"
                f" is {last}",
                where=place,
                expected=f"an end token, {' or '.join(str(token) for token in ends)}",
                fix="Restore the file, or answer the prompts again.",
            )


def choose_rows(rows: Sequence[AnyRow], num_rows: int, max_length: int) -> list[AnyRow]:
    """At most num_rows, evenly over the file, of those no longer than max_length tokens.

    Raises DataError when none is short enough.
    """
    short = [row for row in rows if len(row.input_ids) <= max_length]
    if not short:
        raise DataError(
            f"none of {len(rows)} rows is as short as {max_length} tokens",
            fix="Raise --max-length.",
        )
    count = min(num_rows, len(short))
    return [short[number * len(short) // count] for number in range(count)]


def hold_out_rows(rows: Sequence[AnyRow], max_length: int) -> tuple[list[AnyRow], list[AnyRow]]:
    """(rows to learn from, rows that judge it), of those no longer than max_length tokens.

    Every eighth row judges, 8 at least and 64 at most, evenly over the file. Raises DataError for
    fewer than 16 rows.
    """
    short = [row for row in rows if len(row.input_ids) <= max_length]
    if len(short) < 2 * _FEWEST:
        raise DataError(
            f"{len(short)} rows are no longer than {max_length} tokens",
            expected=f"{2 * _FEWEST} at least: {_FEWEST} are held out to judge by",
            fix="Answer more prompts (`paceline data answer`), or raise --max-length.",
        )
    count = min(_MOST, max(_FEWEST, len(short) // _HELD_OUT))
    chosen = {number * len(short) // count for number in range(count)}
    return (
        [row for number, row in enumerate(short) if number not in chosen],
        [row for number, row in enumerate(short) if number in chosen],
    )


class Moments:
    """H = mean of x x^T of each watched module's inputs, in float64. State: the sums so far."""

    def __init__(self, modules: Sequence[str], *, where: str) -> None:
        self._modules = frozenset(modules)
        self._where = where
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def seen(self, row_id: str, module: str, inputs_NC: Tensor) -> None:
        """Adds one row's inputs. Raises DataError naming row and module where one is not finite."""
        import torch

        if module not in self._modules:
            return
        wide = inputs_NC.to(torch.float32)
        if not bool(wide.isfinite().all()):
            raise DataError(
                f"row '{row_id}' gives '{module}' inputs that are not finite numbers",
                where=self._where,
                expected="finite inputs",
                fix="Leave the row out, or check the draft's weights (`paceline validate --deep`).",
            )
        product = (wide.T @ wide).to(torch.float64)
        known = self._sums.get(module)
        self._sums[module] = product if known is None else known.add_(product)
        self._counts[module] = self._counts.get(module, 0) + len(wide)

    def hessian(self, module: str) -> Tensor:
        """Raises DataError for a module that no row reached."""
        if module not in self._sums:
            raise DataError(
                f"no row reached '{module}'", where=self._where, expected="inputs to calibrate on"
            )
        return self._sums[module] / self._counts[module]

    def num_inputs(self, module: str) -> int:
        """Input vectors seen so far."""
        return self._counts.get(module, 0)
