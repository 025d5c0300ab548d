"""Rules about sizes: inside the config, against the target, and against the contest's context."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.draft import Eagle3Sizes
from paceline.problems import show_value
from paceline.target import TargetFacts
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding
from paceline.validate.rope import MAX_TABLE_ROWS, check_rope, count_table_rows

__all__ = ["check_fit", "check_positions"]

_FILE = "config.json"
_MAX_POSITIONS = 262_144
_MAX_LAYERS = 16
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_fit(case: Case) -> Iterator[Finding]:
    """Rules that need the sizes; most also need the target."""
    if case.sizes is None:
        return
    yield from _check_heads(case.sizes)
    yield from _check_layers(case)
    yield from check_rope(case)
    yield from check_positions(case)
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
        rest = ", the rest is padding" if tokens and tokens < target.vocab_size else ""
        known = f" (its tokenizer has {tokens} tokens{rest})" if tokens else ""
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
    if sizes.hidden_size % heads:
        yield finding(
            "cfg.heads",
            _FILE,
            f"hidden_size {sizes.hidden_size} is not a multiple of {heads} attention heads; vLLM"
            " stops at such a config, head_dim or not",
            where="num_attention_heads",
            found=heads,
            expected=f"a divisor of {sizes.hidden_size}",
            fix="Train with a number of heads that divides hidden_size.",
        )
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


def _tell_short(case: Case, last: int) -> str:
    if case.family in ("draft_model", "dflash"):
        return (
            f"vLLM 0.31.0 does not stretch the rotary table of a {case.family} draft, and past"
            f" {last:,} tokens it stops drafting or reads beyond the table"
        )
    return (
        "vLLM 0.31.0 stretches an eagle3 draft's rotary table to the target's length, but its V1"
        f" runner still stops drafting once a sequence passes {last:,} tokens"
    )


def check_positions(case: Case) -> Iterator[Finding]:
    """`cfg.pos`: enough positions for the context, and no rotary table that nobody needs."""
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
    elif positions > ceiling or count_table_rows(case, positions) > 4 * ceiling:
        rows = int(count_table_rows(case, positions))
        refused = case.is_contest or rows > MAX_TABLE_ROWS
        yield finding(
            "cfg.pos",
            _FILE,
            f"{positions:,} positions make a rotary table of {rows:,} rows that nobody needs, in"
            " memory that the file sizes hide",
            where=where,
            found=stated,
            expected=f"at most {ceiling:,}",
            fix="Copy the target's value.",
            severity="error" if refused else "warning",
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
                else _tell_short(case, max(positions - k, 0))
            ),
            where=where,
            found=positions,
            expected=f"at least {useful:,}",
            fix="Nothing the draft could do: a longer target is needed for that context."
            if own
            else f"Train and state at least {useful:,} positions.",
            severity="warning",
        )


def _check_dtype(case: Case) -> Iterator[Finding]:
    config, target = case.config, case.target
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str):
        return
    name = dtype.removeprefix("torch.")
    if name != dtype:
        yield finding(
            "cfg.dtype",
            _FILE,
            f"'{show_value(dtype)}' stops vLLM while it loads: the name has no 'torch.'",
            where="dtype",
            found=dtype,
            expected="bfloat16",
            fix=f'Write "{show_value(name)}".',
        )
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
