"""Per-request times out of requests.jsonl, for the distributions on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import ResultError

__all__ = ["pair_times", "read_times"]


def read_times(
    rows: Iterable[Mapping[str, Any]], aliases: Mapping[str, Any] | None = None
) -> dict[str, dict[str, float]]:
    """Time per token in ms: arm -> request id -> value, the last one where an id was repeated.

    Only rows of kind "answer" count. Such a row holds `arm`, `id`, `chunk_times_s` and
    `chunk_tokens` as an Answer does: chunk i came at chunk_times_s[i] with chunk_tokens[i] tokens.
    Time per token = (last - first chunk's time) / (tokens after the first chunk); a row with a
    single chunk has none. aliases: arm -> the arm that it was measured as. Raises ResultError.
    """
    found: dict[str, dict[str, float]] = {}
    for number, row in enumerate(rows, 1):
        if row.get("kind") != "answer":
            continue
        arm, request_id = row.get("arm"), row.get("id")
        times, tokens = _read_numbers(row, "chunk_times_s"), _read_numbers(row, "chunk_tokens")
        if not isinstance(arm, str) or not isinstance(request_id, str):
            raise _wrong(number, "arm and id are not both strings")
        if not times or len(times) != len(tokens):
            raise _wrong(number, "chunk_times_s and chunk_tokens are not lists of equal length")
        later = sum(tokens[1:])
        if later > 0 and times[-1] > times[0]:
            value = (times[-1] - times[0]) * 1000.0 / later
            found.setdefault(arm, {})[request_id] = value
    for arm, other in (aliases or {}).items():
        if other in found:
            found[arm] = found[other]
    return found


def pair_times(times: Mapping[str, Mapping[str, float]]) -> list[float]:
    """Baseline over candidate for every request id that both arms timed."""
    ours, theirs = times.get("candidate", {}), times.get("baseline", {})
    return [theirs[request_id] / ours[request_id] for request_id in ours if request_id in theirs]


def _read_numbers(row: Mapping[str, Any], key: str) -> list[float]:
    """The list at a key; empty when it is anything but a list of numbers."""
    values = row.get(key)
    if not isinstance(values, list):
        return []
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return numbers if len(numbers) == len(values) else []


def _wrong(number: int, what: str) -> ResultError:
    return ResultError(
        what, where=f"requests.jsonl:{number}", fix="Run `paceline eval` again, or remove the file."
    )
