"""`cfg.contract`: what vLLM 0.31.0 serves and no contract here describes is said, not refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.validate.case import Case
from paceline.validate.config import check_code_keys
from paceline.validate.quantization import check_uncovered_quantization
from paceline.validate.report import Finding, finding

__all__ = ["check_uncovered"]

_LAYER = "transformer_layer_config"


def check_uncovered(case: Case, form: str) -> Iterator[Finding]:
    """Files, JSON and headers were looked at by their own rules; here what holds of any config.

    form: in words, as `find_uncovered` gives it.
    """
    yield finding(
        "cfg.contract",
        "config.json",
        f"this is {form}: vLLM 0.31.0 serves that, and there is no contract for it here, so its"
        " keys, tensors and fit to the target were not checked",
        found=form,
        expected="a form with a contract: docs/results/contracts.md lists them",
        fix="Try it on vLLM itself; Paceline neither serves nor measures it."
        if not case.is_contest
        else "Submit a draft of a form that can be checked.",
        severity="error" if case.is_contest else None,
    )
    yield from check_code_keys(case)
    config: dict[str, Any] = case.scan.raw_config or {}
    inner = config.get(_LAYER)
    for level in (config, inner if isinstance(inner, dict) else {}):
        yield from check_uncovered_quantization(level)
