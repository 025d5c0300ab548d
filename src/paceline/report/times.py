"""Per-request times out of requests.jsonl, for the distributions on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from paceline.errors import ResultError

__all__ = ["pair_times", "read_times"]


def read_times(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Time per token in ms: arm -> request id -> value, the median where an id was repeated.

    A row holds `arm`, `id`, `chunk_times_s` and `chunk_tokens` as an Answer does: chunk i came at
    chunk_times_s[i] with chunk_tokens[i] tokens. Time per token = (last - first chunk's time) /
    (tokens after the first chunk); a row with a single chunk has none. Raises ResultError.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for number, row in enumerate(rows, 1):
        arm, request_id = row.get("arm"), row.get("id")
        times, tokens = row.get("chunk_times_s"), row.get("chunk_tokens")
        if not isinstance(arm, str) or not isinstance(request_id, str):
            raise _wrong(number, "arm and id are not both strings")
        if times is None or tokens is None:
            continue  # a failed request has no times
        if not _all_numbers(times) or not _all_numbers(tokens) or len(times) != len(tokens):
            raise _wrong(number, "chunk_times_s and chunk_tokens are not lists of equal length")
        later = sum(tokens[1:])
        if later > 0 and times[-1] > times[0]:
            value = (times[-1] - times[0]) * 1000.0 / later
            found.setdefault(arm, {}).setdefault(request_id, []).append(value)
    return {
        arm: {request_id: median(values) for request_id, values in by_id.items()}
        for arm, by_id in found.items()
    }


def pair_times(times: Mapping[str, Mapping[str, float]]) -> list[float]:
    """Baseline over candidate for every request id that both arms timed."""
    ours, theirs = times.get("candidate", {}), times.get("baseline", {})
    return [theirs[request_id] / ours[request_id] for request_id in ours if request_id in theirs]


def _all_numbers(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def _wrong(number: int, what: str) -> ResultError:
    return ResultError(
        what, where=f"requests.jsonl:{number}", fix="Run `paceline eval` again, or remove the file."
    )
