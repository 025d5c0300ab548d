"""What a quantisation cost and saved, and whether the cost is within what was allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import PlanError, ResultError

__all__ = ["Price", "build_price", "judge_loss", "parse_share", "price_row"]


@dataclass(frozen=True, kw_only=True)
class Price:
    """rows: figure -> {"before", "after", "ratio", "low", "high"}; ratio is after : before, except
    for memory and time, where it is before : after, so that above 1 is better everywhere. None
    where something was not measured. loss: of a draft's acceptance, or the rise of a target's
    perplexity; 0.02 for 2 %, with its interval.
    verdict: "within", "exceeds", or "open" where the loss is within and its interval is not.
    """

    rows: Mapping[str, Mapping[str, Any]]
    kernels: Mapping[str, Mapping[str, int]]
    loss: float
    loss_low: float | None
    loss_high: float | None
    max_loss: float | None
    verdict: str


def parse_share(text: str) -> float:
    """ "2%" or "0.02" -> 0.02. Raises PlanError for anything outside 0 to 100 %."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= share <= 1:
        raise PlanError(f"'{text}' is no share", where="--max-loss", expected="2% or 0.02")
    return share


def build_price(
    result: Mapping[str, Any],
    *,
    files_bytes: tuple[int, int],
    kernels: Mapping[str, Mapping[str, int]],
    max_loss: float | None,
) -> Price:
    """From a run's result.json whose baseline is the draft before and whose candidate is after.

    Raises ResultError when the two were not measured against each other.
    """
    ratios = result.get("ratios")
    if not isinstance(ratios, Mapping) or not ratios.get("tau"):
        raise ResultError("the run has no ratios: before and after were not both measured")
    before, after = result["arms"]["baseline"], result["arms"]["candidate"]
    tau, score = ratios["tau"], result.get("score") or {}
    rows: dict[str, Mapping[str, Any]] = {
        "files_bytes": price_row(*files_bytes, files_bytes[0] / files_bytes[1]),
        "memory_bytes": _of(before, after, ratios.get("memory"), "memory", "total_bytes"),
        "acceptance_length": price_row(
            (before.get("vllm") or {}).get("acceptance_length"),
            (after.get("vllm") or {}).get("acceptance_length"),
            None,
        ),
        "tau": _of(before, after, tau, "tau", "value"),
        "tpot_ms": _of(before, after, ratios.get("tpot"), "tpot_ms", "median"),
        "score": price_row(
            100.0,
            score.get("value"),
            None if score.get("value") is None else score["value"] / 100,
            None if score.get("low") is None else score["low"] / 100,
            None if score.get("high") is None else score["high"] / 100,
        ),
    }
    low, high = tau.get("low"), tau.get("high")
    loss = 1.0 - float(tau["value"])
    loss_low = None if high is None else 1.0 - float(high)
    loss_high = None if low is None else 1.0 - float(low)
    return Price(
        rows=rows,
        kernels=kernels,
        loss=loss,
        loss_low=loss_low,
        loss_high=loss_high,
        max_loss=max_loss,
        verdict=judge_loss(loss, loss_high, max_loss),
    )


def judge_loss(loss: float, loss_high: float | None, max_loss: float | None) -> str:
    """ "within", "exceeds", or "open"; see Price."""
    if max_loss is None:
        return "within"
    if loss > max_loss:
        return "exceeds"
    return "within" if loss_high is not None and loss_high <= max_loss else "open"


def _of(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    ratio: Mapping[str, Any] | None,
    *keys: str,
) -> dict[str, Any]:
    first, last = ((arm.get(keys[0]) or {}).get(keys[1]) for arm in (before, after))
    ratio = ratio or {}
    return price_row(first, last, ratio.get("value"), ratio.get("low"), ratio.get("high"))


def price_row(
    before: Any,
    after: Any,
    ratio: float | None,
    low: float | None = None,
    high: float | None = None,
) -> dict[str, Any]:
    return {"before": before, "after": after, "ratio": ratio, "low": low, "high": high}
