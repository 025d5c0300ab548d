"""Rules about sizes: inside the config, against the target, and against the contest's context."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paceline.draft import Eagle3Sizes
from paceline.target import TargetFacts
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_fit"]

_FILE = "config.json"
_MAX_POSITIONS = 262_144
_MAX_LAYERS = 16
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def check_fit(case: Case) -> Iterator[Finding]:
    """Rules that need the sizes; most also need the target."""
    if case.sizes is None:
        return
    yield from _check_heads(case.sizes)
    yield from _check_layers(case)
    yield from _check_rope(case)
    yield from _check_positions(case)
    yield from _check_dtype(case)
    if case.sizes.draft_vocab_size > case.sizes.vocab_size:
        yield finding(
            "cfg.vocab",
            _FILE,
            "the draft vocabulary is larger than the vocabulary",
            where="draft_vocab_size",
            found=case.sizes.draft_vocab_size,
            expected=f"at most {case.sizes.vocab_size}",
            fix="A draft vocabulary is a part of the target's.",
        )
    if case.target is not None:
        yield from _check_target(case.sizes, case.target)


def _check_target(sizes: Eagle3Sizes, target: TargetFacts) -> Iterator[Finding]:
    if sizes.target_hidden_size != target.hidden_size:
        yield finding(
            "cfg.hidden",
            _FILE,
            f"the draft reads hidden states {sizes.target_hidden_size} wide, target"
            f" '{target.name}' makes them {target.hidden_size} wide",
            where="hidden_size",
            found=sizes.target_hidden_size,
            expected=str(target.hidden_size),
            fix="Point --target at the model the draft was trained for, or train for this one.",
        )
    if sizes.vocab_size != target.vocab_size:
        tokens = target.num_tokenizer_tokens
        known = f" (its tokenizer has {tokens} tokens, the rest is padding)" if tokens else ""
        yield finding(
            "cfg.vocab",
            _FILE,
            f"vocab_size is {sizes.vocab_size}, target '{target.name}' has {target.vocab_size}"
            f" embedding rows{known}",
            where="vocab_size",
            found=sizes.vocab_size,
            expected=str(target.vocab_size),
            fix="Rebuild the vocabulary map for this target; editing the number alone breaks the"
            " weights.",
        )


def _check_heads(sizes: Eagle3Sizes) -> Iterator[Finding]:
    heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
    if heads % kv_heads:
        yield finding(
            "cfg.heads",
            _FILE,
            f"{heads} attention heads cannot share {kv_heads} key-value heads",
            where="num_key_value_heads",
            found=kv_heads,
            expected=f"a divisor of {heads}",
            fix="State the numbers that the weights were trained with.",
        )
    if sizes.head_dim % 2:
        yield finding(
            "cfg.heads",
            _FILE,
            "an odd head size cannot be rotated",
            where="head_dim",
            found=sizes.head_dim,
            expected="an even number",
            fix="State head_dim; without it vLLM takes hidden_size / num_attention_heads.",
        )
    elif sizes.head_dim not in _CPU_HEAD_SIZES:
        yield finding(
            "cfg.heads",
            _FILE,
            f"head size {sizes.head_dim} does not run on vLLM 0.31.0's CPU attention",
            where="head_dim",
            found=sizes.head_dim,
            expected=", ".join(map(str, _CPU_HEAD_SIZES)),
            fix="Fine on a GPU whose attention has it.",
            severity="note",
        )


def _check_layers(case: Case) -> Iterator[Finding]:
    config, sizes = case.config, case.sizes
    assert sizes is not None
    if sizes.num_hidden_layers > _MAX_LAYERS:
        yield finding(
            "cfg.layers",
            _FILE,
            f"{sizes.num_hidden_layers} draft layers are not a draft",
            where="num_hidden_layers",
            found=sizes.num_hidden_layers,
            expected=f"1 to {_MAX_LAYERS}",
            fix="An EAGLE-3 draft usually has one layer.",
        )
    types = config.get("layer_types")
    slides = isinstance(types, list) and "sliding_attention" in types
    if isinstance(types, list) and (
        len(types) != sizes.num_hidden_layers
        or not all(kind in ("full_attention", "sliding_attention") for kind in types)
    ):
        yield finding(
            "cfg.layers",
            _FILE,
            "layer_types does not describe the draft's layers",
            where="layer_types",
            found=types,
            expected=f"{sizes.num_hidden_layers} of full_attention or sliding_attention",
            fix="Remove it, or give one entry a draft layer (not one a target layer).",
        )
    window = config.get("sliding_window")
    if slides and not (isinstance(window, int) and window >= 1):
        yield finding(
            "cfg.layers",
            _FILE,
            "a sliding layer needs a window",
            where="sliding_window",
            found=window,
            expected="a whole number of at least 1",
            fix="State sliding_window.",
        )
    elif window is not None and not slides:
        yield finding(
            "cfg.layers",
            _FILE,
            "sliding_window has no effect without a sliding layer in layer_types",
            where="sliding_window",
            found=window,
            expected="no key",
            fix="Remove it, or name the sliding layers in layer_types.",
            severity="warning",
        )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _rope(case: Case) -> dict[str, Any]:
    """rope_parameters, or the older keys put together; null counts as absent."""
    config = case.config
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            rope.update(config[key])
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope["type"]
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    return rope


def _check_rope(case: Case) -> Iterator[Finding]:
    rope, sizes, target = _rope(case), case.sizes, case.target
    assert sizes is not None
    where = "rope_parameters"
    for key in _MROPE_KEYS:
        if key in rope:
            yield finding(
                "cfg.rope",
                _FILE,
                f"'{key}' is for targets with images; a draft has one position a token",
                where=f"{where}.{key}",
                found=rope[key],
                expected="no such key",
                fix="Remove it.",
            )
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        yield finding(
            "cfg.rope",
            _FILE,
            "the rotary type is not known",
            where=f"{where}.rope_type",
            found=kind,
            expected=", ".join(_ROPE_TYPES),
            fix="Copy the target's rope_parameters.",
        )
    for key, low, high in (
        ("rope_theta", 1.0, 1e12),
        ("factor", 1.0, 1024.0),
        ("partial_rotary_factor", 1e-6, 1.0),
    ):
        value = rope.get(key)
        number = _number(value)
        if value is not None and (number is None or not low <= number <= high):
            yield finding(
                "cfg.rope",
                _FILE,
                f"'{key}' is out of range",
                where=f"{where}.{key}",
                found=value,
                expected=f"a number from {low:g} to {high:g}",
                fix="Copy the target's rope_parameters.",
            )
    yield from _check_rotary_dim(case, rope, sizes.head_dim)
    if target is not None:
        own = _number(rope.get("rope_theta")) or 10000.0
        theirs = _number(target.rope_parameters.get("rope_theta")) or 10000.0
        if not math.isclose(own, theirs):
            yield finding(
                "cfg.rope",
                _FILE,
                f"rope_theta is {own:g}, the target's is {theirs:g}; vLLM never complains, a wrong"
                " one only lowers acceptance",
                where=f"{where}.rope_theta",
                found=rope.get("rope_theta", "nothing: vLLM takes 10000"),
                expected="the value of training",
                fix="Right if the draft was trained with it.",
                severity="warning" if "rope_theta" not in rope else "note",
            )


def _check_rotary_dim(case: Case, rope: dict[str, Any], head_dim: int) -> Iterator[Finding]:
    """U17: trained on all dimensions, served on a part of them."""
    factor = _number(rope.get("partial_rotary_factor"))
    trained = (case.scan.metadata or {}).get("trained")
    recorded = trained.get("trained_rotary_dim") if isinstance(trained, dict) else None
    served = int(head_dim * (1.0 if factor is None else min(max(factor, 0.0), 1.0)))
    if recorded is not None and recorded != served:
        yield finding(
            "cfg.rope",
            _FILE,
            f"the draft was trained with {recorded!r} rotated dimensions, the config gives"
            f" {served}",
            where="rope_parameters.partial_rotary_factor",
            found=served,
            expected=f"{recorded!r}",
            fix="State the factor of training.",
        )
    elif recorded is None and factor is not None and factor < 1.0:
        yield finding(
            "cfg.rope",
            _FILE,
            f"only {served} of {head_dim} dimensions are rotated when served, and the record does"
            " not say how many were in training",
            where="rope_parameters.partial_rotary_factor",
            found=factor,
            expected="metadata.json: trained.trained_rotary_dim",
            fix="Check the training code and record the number.",
            severity="warning",
        )


def _table_rows(case: Case, positions: int) -> float:
    """Rows of the rotary table: these scalings multiply the positions (llama3 does not)."""
    rope = _rope(case)
    factor = _number(rope.get("factor")) or 1.0
    if rope.get("rope_type") == "yarn":
        original = _number(rope.get("original_max_position_embeddings"))
        return (positions if original is None else original) * factor
    return positions * factor if rope.get("rope_type") in ("linear", "dynamic") else positions


def _check_positions(case: Case) -> Iterator[Finding]:
    stated = case.config.get("max_position_embeddings")
    positions = stated if isinstance(stated, int) and not isinstance(stated, bool) else 2048
    k = case.num_speculative_tokens or 1
    context = case.limits.context_tokens
    needed = context + k + 1
    where = "max_position_embeddings"
    target = case.target.max_position_embeddings if case.target else None
    ceiling = max(_MAX_POSITIONS, target or 0)
    if positions < 1:
        yield finding(
            "cfg.pos",
            _FILE,
            "there must be positions",
            where=where,
            found=stated,
            expected=f"at least {needed}",
            fix="Copy the target's value.",
            severity="error",
        )
    elif positions > ceiling or _table_rows(case, positions) > 4 * ceiling:
        yield finding(
            "cfg.pos",
            _FILE,
            f"{positions:,} positions make a rotary table that nobody needs, in memory that the"
            " file sizes hide",
            where=where,
            found=stated,
            expected=f"at most {ceiling:,}",
            fix="Copy the target's value.",
            severity="error",
        )
    elif positions < needed:
        own = target is not None and target < needed and positions >= target
        useful = needed if target is None else min(needed, target)
        default = " (not stated: the default)" if stated is None else ""
        yield finding(
            "cfg.pos",
            _FILE,
            f"{positions:,} positions{default} are fewer than {needed:,} (context {context:,} + K"
            f" {k} + 1); "
            + (
                f"the target itself ends at {target:,}"
                if own
                else f"vLLM 0.31.0 stretches an eagle3 draft's rotary table to the target's length,"
                f" but its V1 runner still stops drafting once a sequence passes"
                f" {max(positions - k, 0):,} tokens"
            ),
            where=where,
            found=positions,
            expected=f"at least {useful:,}",
            fix="Nothing to do." if own else f"Train and state at least {useful:,} positions.",
            severity="note" if own else "warning",
        )


def _check_dtype(case: Case) -> Iterator[Finding]:
    config, target = case.config, case.target
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str):
        return
    name = dtype.removeprefix("torch.")
    if name == "float32":
        yield finding(
            "cfg.dtype",
            _FILE,
            "float32 weights double the files; vLLM casts them to the target's dtype",
            where="dtype",
            found=dtype,
            expected="bfloat16",
            fix="Save the weights as bfloat16.",
            severity="warning",
        )
    elif name not in ("bfloat16", "float16"):
        yield finding(
            "cfg.dtype",
            _FILE,
            "is not a dtype that a draft may have",
            where="dtype",
            found=dtype,
            expected="bfloat16 or float16",
            fix="Save the weights as bfloat16.",
        )
    elif target is not None and target.dtype in ("bfloat16", "float16") and name != target.dtype:
        yield finding(
            "cfg.dtype",
            _FILE,
            f"the draft is {name}, the target {target.dtype}; vLLM runs the draft in the target's"
            " dtype",
            where="dtype",
            found=dtype,
            expected=target.dtype,
            fix="Train or cast, then measure in the target's dtype; --deep looks for overflow.",
            severity="warning",
        )
