"""`cfg.contract`: what vLLM 0.31.0 serves and no contract here describes is said, not refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.validate.case import Case
from paceline.validate.config import check_code_keys
from paceline.validate.quantization import check_uncovered_quantization
from paceline.validate.report import Finding, finding

__all__ = ["check_uncovered"]

_LAYER = "transformer_layer_config"
_FUSED = ("qkv_proj", "gate_up_proj")


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
    yield from _check_gptq(case, config)


def _check_gptq(case: Case, config: dict[str, Any]) -> Iterator[Finding]:
    """`q.method`: a layer that vLLM does not find by its own name is built plain."""
    settings = config.get("quantization_config")
    if case.family not in ("eagle3", "dflash") or not isinstance(settings, dict):
        return
    named = json.dumps(settings.get("modules_in_block_to_quantize"))
    if settings.get("quant_method") == "gptq" and not all(name in named for name in _FUSED):
        yield finding(
            "q.method",
            "config.json",
            f"vLLM 0.31.0 looks for the packed layers of a GPTQ draft of family {case.family} by"
            " its own names, finds none, builds them plain and stops at the packed weights",
            where="quantization_config.modules_in_block_to_quantize",
            found=settings.get("modules_in_block_to_quantize"),
            expected=f'["{_FUSED[0]}", "o_proj", "{_FUSED[1]}", "down_proj"]',
            fix="State modules_in_block_to_quantize with vLLM's names.",
        )
