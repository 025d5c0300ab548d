"""Rules about rotary positions: what vLLM 0.31.0 reads, what it stops at, what it misreads.

`rope_parameters` is today's form. `rope_scaling` is the older one; where both are stated it
replaces the other whole, rope_theta included. Each type needs keys of its own, or loading stops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["MAX_TABLE_ROWS", "check_rope", "count_table_rows"]

_FILE = "config.json"
MAX_TABLE_ROWS = 2**22  # a table of more is refused, whatever a draft needs
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_RANGES = {
    "rope_theta": (1.5, 1e12),
    "factor": (1.0, 1024.0),
    "partial_rotary_factor": (1e-6, 1.0),
    "original_max_position_embeddings": (1.0, 2.0**26),
    "low_freq_factor": (1e-3, 1024.0),
    "high_freq_factor": (1e-3, 1024.0),
    "beta_fast": (1e-3, 1024.0),
    "beta_slow": (1e-3, 1024.0),
    "attention_factor": (1e-3, 1024.0),
    "extrapolation_factor": (1e-3, 1024.0),
    "short_mscale": (1e-3, 1024.0),
    "long_mscale": (1e-3, 1024.0),
    "mscale": (0.0, 1024.0),
    "mscale_all_dim": (0.0, 1024.0),
}
_LISTS = ("short_factor", "long_factor")
_OTHER_KEYS = ("rope_type", "type", "truncate", "apply_yarn_scaling", *_LISTS)
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _read_rope(case: Case) -> dict[str, Any]:
    """The rotary setting as vLLM ends up with it; a top-level null counts as absent."""
    config = case.config
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict) and config[key]:
            rope = dict(config[key])
            break
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope["type"]
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    return rope


def check_rope(case: Case) -> Iterator[Finding]:
    """All of `cfg.rope`."""
    rope = _read_rope(case)
    config = case.config
    if config.get("rope_scaling") and config.get("rope_parameters"):
        yield _refuse(
            "rope_scaling",
            "stands beside rope_parameters: vLLM drops the whole of rope_parameters, its"
            " rope_theta included",
            show_value(config["rope_scaling"]),
            "one of the two",
            "Put everything into rope_parameters.",
        )
    yield from _check_keys(rope)
    yield from _check_numbers(rope)
    yield from _check_rotary_dim(case, rope)
    if case.family == "draft_model":  # a model of its own, with a theta of its own
        if "rope_theta" not in rope:
            yield _refuse(
                "rope_theta",
                "is not stated; vLLM takes 10000",
                "nothing",
                "the value of training",
                "State it.",
                severity="warning",
            )
    elif case.target is not None:
        yield from _compare_theta(rope, case.target.rope_parameters)


def _refuse(
    key: str, message: str, found: Any, expected: str, fix: str = "", *, severity: str | None = None
) -> Finding:
    return finding(
        "cfg.rope",
        _FILE,
        f"'{show_value(key)}' {message}",
        where=key if key == "rope_scaling" else f"rope_parameters.{show_value(key)}",
        found=found,
        expected=expected,
        fix=fix or "Copy the target's rope_parameters.",
        severity=severity,
    )


def _check_keys(rope: dict[str, Any]) -> Iterator[Finding]:
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _NEEDED:
        yield _refuse("rope_type", "is not a known rotary type", kind, ", ".join(_NEEDED))
        kind = "default"
    for key in _NEEDED[kind]:
        if rope.get(key) is None:
            yield _refuse(
                key, f"is missing: vLLM stops without it at type {kind}", "nothing", "a value"
            )
    for key, value in rope.items():
        if key in _MROPE_KEYS:
            yield _refuse(
                key,
                "is for targets with images; a draft has one position a token",
                value,
                "no such key",
                "Remove it.",
            )
        elif key not in _RANGES and key not in _OTHER_KEYS:
            yield _refuse(
                key,
                "is not a rotary setting that can be checked; vLLM may stop at it or turn other"
                " dimensions than in training",
                value,
                "no such key",
                "Remove it.",
            )
        elif value is None and key not in _NEEDED[kind]:
            yield _refuse(key, "is null, and vLLM stops at it", "null", "a value, or no key")


def _check_numbers(rope: dict[str, Any]) -> Iterator[Finding]:
    for key, (low, high) in _RANGES.items():
        value = rope.get(key)
        number = _number(value)
        if value is not None and (number is None or not low <= number <= high):
            yield _refuse(key, "is out of range", value, f"a number from {low:g} to {high:g}")
    for key in ("truncate", "apply_yarn_scaling"):
        if rope.get(key) is not None and not isinstance(rope[key], bool):
            yield _refuse(key, "is not a truth value", rope[key], "true or false")
    low_freq, high_freq = (_number(rope.get(f"{end}_freq_factor")) for end in ("low", "high"))
    if low_freq is not None and high_freq is not None and low_freq >= high_freq:
        yield _refuse(
            "low_freq_factor", "is not below high_freq_factor", low_freq, f"below {high_freq:g}"
        )


def _check_rotary_dim(case: Case, rope: dict[str, Any]) -> Iterator[Finding]:
    """U17: trained on all dimensions, served on a part of them."""
    head_dim = case.head_dim
    if head_dim is None:
        return
    factor = _number(rope.get("partial_rotary_factor"))
    trained = (case.scan.metadata or {}).get("trained")
    recorded = trained.get("trained_rotary_dim") if isinstance(trained, dict) else None
    served = int(head_dim * (1.0 if factor is None else min(max(factor, 0.0), 1.0)))
    where = "partial_rotary_factor"
    if factor is not None and (served < 2 or served % 2):
        message = f"rotates {served} of {head_dim} dimensions, which cannot be paired"
        yield _refuse(where, message, factor, "an even number of dimensions, at least 2")
    elif recorded is not None and recorded != served:
        shown = show_value(recorded)
        yield finding(
            "cfg.rope",
            _FILE,
            f"the draft was trained with {shown} rotated dimensions, the config gives {served}",
            where=f"rope_parameters.{where}",
            found=served,
            expected=shown,
            fix="State the factor of training.",
        )
    elif recorded is None and factor is not None and factor < 1.0:
        yield finding(
            "cfg.rope",
            _FILE,
            f"only {served} of {head_dim} dimensions are rotated when served, and the record does"
            " not say how many were in training",
            where=f"rope_parameters.{where}",
            found=factor,
            expected="metadata.json: trained.trained_rotary_dim",
            fix="Check the training code and record the number.",
            severity="warning",
        )
    for key in _LISTS:
        values = rope.get(key)
        if values is not None and not (
            isinstance(values, list)
            and len(values) == served // 2
            and all((_number(item) or 0.0) > 0.0 for item in values)
        ):
            yield _refuse(
                key, "does not fit the rotated dimensions", values, f"{served // 2} numbers above 0"
            )


def _compare_theta(rope: dict[str, Any], target: dict[str, Any]) -> Iterator[Finding]:
    own = _number(rope.get("rope_theta")) or 10000.0
    theirs = _number(target.get("rope_theta")) or 10000.0
    if not math.isclose(own, theirs):
        yield finding(
            "cfg.rope",
            _FILE,
            f"rope_theta is {own:g}, the target's is {theirs:g}; vLLM never complains, a wrong"
            " one only lowers acceptance",
            where="rope_parameters.rope_theta",
            found=rope.get("rope_theta", "nothing: vLLM takes 10000"),
            expected="the value of training",
            fix="Right if the draft was trained with it.",
            severity="warning" if "rope_theta" not in rope else "note",
        )


def count_table_rows(case: Case, positions: int) -> float:
    """Rows of the rotary table: these scalings multiply the positions (llama3 does not)."""
    rope = _read_rope(case)
    factor = _number(rope.get("factor")) or 1.0
    if rope.get("rope_type") == "yarn":
        original = _number(rope.get("original_max_position_embeddings"))
        return (positions if original is None else original) * factor
    return positions * factor if rope.get("rope_type") in ("linear", "dynamic") else positions
