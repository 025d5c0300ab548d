"""DESIGN.toml: a draft on paper. What is left out is taken from the target, and said."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, RecipeError
from paceline.forecast.shape import TargetShape
from paceline.problems import show_value

__all__ = [
    "FAMILIES",
    "WEIGHT_FORMATS",
    "Design",
    "build_design",
    "native_baseline",
    "parse_design",
    "read_design",
]

WEIGHT_FORMATS = ("bf16", "fp8", "w8a16", "w4a16")
_KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}

_ATTENTION = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
    "window",
    "weights",
    "group_size",
    "kv_dtype",
)
_TAPPED = (*_ATTENTION, "num_taps", "draft_vocab_size", "own_embedding", "own_head")
# The keys of each family besides `family` and `num_speculative_tokens`.
FAMILIES: dict[str, tuple[str, ...]] = {
    "mtp": (),
    "eagle3": (*_TAPPED, "parallel"),
    "medusa": ("num_layers", "draft_vocab_size", "one_head"),
    "draft_model": (*_ATTENTION, "own_head"),
    "dflash": _TAPPED,
    "ngram": (),
    "suffix": (),
}
_WHY_NOT = {
    "mtp": (
        "vLLM 0.31.0 builds an MTP head from the target's own config and quantisation, with the"
        " target's full head: this cannot be expressed"
    ),
    "medusa": "vLLM 0.31.0 reads no such setting for medusa",
    "draft_model": "vLLM 0.31.0 gives a draft model the target's vocabulary and shares nothing",
    "eagle3": "vLLM 0.31.0 has no such setting for eagle3",
    "dflash": "vLLM 0.31.0 has no such setting for dflash",
    "ngram": "a model-free method has no sizes",
    "suffix": "a model-free method has no sizes",
}
_LLAMA_LAYERS = ("eagle3", "draft_model")
_ALL_KEYS = sorted({key for keys in FAMILIES.values() for key in keys})
_FLAGS = ("own_embedding", "own_head", "one_head", "parallel")
_WORDS = {"weights": WEIGHT_FORMATS, "kv_dtype": tuple(_KV_DTYPES)}


@dataclass(frozen=True, kw_only=True)
class Design:
    """A draft with every size filled in. Sizes that the family does not have are 0 or False.

    weights: format of the linear layers; group_size: inputs that share a scale (0: one scale a
    row). window: 0 for full attention. own_embedding, own_head: stored with the draft, not shared
    with the target. one_head: medusa's heads end in one stored output matrix. parallel: an eagle3
    draft fills its K slots in one pass (P-EAGLE). stated: keys that the file gives; all others came
    from the target or from vLLM's defaults.
    """

    family: str
    num_speculative_tokens: int
    num_layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 0
    window: int = 0
    num_taps: int = 0
    vocab_size: int = 0
    draft_vocab_size: int = 0
    own_embedding: bool = False
    own_head: bool = False
    one_head: bool = False
    parallel: bool = False
    weights: str = "bf16"
    group_size: int = 0
    kv_dtype: str = "bfloat16"
    stated: tuple[str, ...] = ()

    @property
    def is_one_pass(self) -> bool:
        """All K tokens come from one pass of the draft."""
        return self.parallel or self.family in ("medusa", "dflash")

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_vocab_size not in (0, self.vocab_size)


def read_design(path: str | Path, shape: TargetShape) -> Design:
    """Reads one DESIGN.toml for a target. Raises RecipeError and PlanError (see parse_design)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "is not UTF-8 text"
        raise RecipeError(
            f"the design cannot be read: {why}", where=str(path), expected="a TOML file"
        ) from None
    return parse_design(text, shape, where=str(path))


def parse_design(text: str, shape: TargetShape, *, where: str = "design") -> Design:
    """Parses a design and fills it in from the target.

    Raises RecipeError for a key or value that means nothing, PlanError for a design that vLLM
    0.31.0 cannot run on this target.
    """
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise RecipeError(f"is not valid TOML: {problem}", where=where) from None
    return build_design(table, shape, where=where)


def build_design(table: dict[str, Any], shape: TargetShape, *, where: str = "design") -> Design:
    """A design out of its keys and values; raises like `parse_design`."""
    for key in table:
        if key not in ("family", "num_speculative_tokens", *_ALL_KEYS):
            raise RecipeError(
                f"key '{show_value(key)}' is unknown",
                where=where,
                expected=f"only family, num_speculative_tokens, {', '.join(_ALL_KEYS)}",
                fix="Remove it; a setting without effect is an error.",
            )
    family = table.get("family")
    if not isinstance(family, str) or family not in FAMILIES:
        raise RecipeError(
            "key 'family' is missing" if family is None else f"family is {show_value(family)}",
            where=where,
            expected=f"one of {', '.join(FAMILIES)}",
        )
    values = {key: _read(key, value, where) for key, value in table.items() if key != "family"}
    if "num_speculative_tokens" not in values:
        raise RecipeError(
            "key 'num_speculative_tokens' is missing", where=where, expected="K, at least 1"
        )
    for key in values:
        if key not in ("num_speculative_tokens", *FAMILIES[family]):
            raise PlanError(
                f"'{key}' is set for family {family}: {_WHY_NOT[family]}",
                where=where,
                expected=f"only {', '.join(FAMILIES[family]) or 'K'}",
                fix="Remove it, or take another family.",
            )
    design = _fill(family, values, shape)
    _check(design, shape, where)
    return design


def native_baseline(shape: TargetShape, num_speculative_tokens: int) -> Design | None:
    """The target's own MTP head with this K; None for a target without one."""
    if not shape.facts.num_mtp_layers:
        return None
    text = f'family = "mtp"\nnum_speculative_tokens = {num_speculative_tokens}\n'
    return parse_design(text, shape, where="the baseline of the rules")


def _read(key: str, value: Any, where: str) -> Any:
    if key in _FLAGS:
        good, expected = isinstance(value, bool), "true or false"
    elif key in _WORDS:
        good = isinstance(value, str) and value in _WORDS[key]
        expected = f"one of {', '.join(_WORDS[key])}"
    else:
        good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**26
        expected = "a whole number from 1 to 67,108,864"
    if not good:
        raise RecipeError(f"key '{key}' is {show_value(value)}", where=where, expected=expected)
    return _KV_DTYPES[value] if key == "kv_dtype" else value


def _fill(family: str, values: dict[str, Any], shape: TargetShape) -> Design:
    facts = shape.facts
    defaults: dict[str, Any] = {
        "num_layers": facts.num_mtp_layers if family == "mtp" else 1,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_heads": facts.num_attention_heads,
        "num_kv_heads": facts.num_key_value_heads,
        "head_dim": facts.head_dim,
        "max_position_embeddings": facts.max_position_embeddings,
        "num_taps": 3 if family in ("eagle3", "dflash") else 0,
        "draft_vocab_size": facts.vocab_size,
        "one_head": family == "medusa",
        "own_embedding": family == "draft_model",
        "own_head": family == "draft_model" and not facts.tie_word_embeddings,
    }
    if family in ("ngram", "suffix"):
        defaults = {}
    elif family == "medusa":
        kept = ("num_layers", "hidden_size", "draft_vocab_size", "one_head")
        defaults = {key: defaults[key] for key in kept}
    merged = {**defaults, "vocab_size": facts.vocab_size, **values}
    if family in _LLAMA_LAYERS and "num_heads" not in values:
        merged["num_heads"] = _fit_heads(merged)
    small = merged.get("draft_vocab_size", 0) not in (0, facts.vocab_size)
    other_width = merged.get("hidden_size", 0) not in (0, facts.hidden_size)
    if family in ("eagle3", "dflash"):  # the target's matrices cannot stand in for these
        merged["own_head"] = values.get("own_head", small or other_width)
        merged["own_embedding"] = values.get("own_embedding", other_width)
    return Design(family=family, **merged, stated=tuple(sorted(values)))


def _fit_heads(sizes: dict[str, Any]) -> int:
    """The most heads, up to the target's, that divide hidden_size and share num_kv_heads; the
    target's own where there are none, and the check then says why not."""
    heads, hidden, kv_heads = (sizes[k] for k in ("num_heads", "hidden_size", "num_kv_heads"))
    fitting = [n for n in range(heads, 0, -1) if hidden % n == 0 and n % kv_heads == 0]
    return int(fitting[0] if fitting else heads)


def _check(design: Design, shape: TargetShape, where: str) -> None:
    """Raises PlanError for what vLLM 0.31.0 would refuse or silently get wrong."""

    def require(holds: bool, what: str, expected: str, fix: str = "") -> None:
        if not holds:
            raise PlanError(what, where=where, expected=expected, fix=fix)

    facts, k = shape.facts, design.num_speculative_tokens
    if design.family == "mtp":
        layers = facts.num_mtp_layers
        require(
            layers > 0,
            f"family is mtp, but target {facts.name} has no MTP layer",
            "a target with mtp_num_hidden_layers",
        )
        require(
            k <= layers or k % layers == 0,
            f"num_speculative_tokens is {k}, and the target predicts {layers} tokens a pass",
            f"at most {layers}, or a multiple of it",
        )
    if design.num_heads:
        require(
            design.num_heads % design.num_kv_heads == 0,
            f"num_heads {design.num_heads} is not a multiple of num_kv_heads {design.num_kv_heads}",
            "whole groups of query heads",
        )
        require(
            design.family not in _LLAMA_LAYERS or design.hidden_size % design.num_heads == 0,
            f"num_heads {design.num_heads} does not divide hidden_size {design.hidden_size}",
            "a divisor: vLLM refuses such a Llama layer, whatever head_dim says",
        )
    small = design.draft_vocab_size > design.vocab_size
    require(
        not small,
        f"draft_vocab_size is {design.draft_vocab_size:,}",
        f"at most the target's {design.vocab_size:,}",
    )
    if design.family in ("eagle3", "dflash"):
        other = design.hidden_size != facts.hidden_size
        require(
            design.own_head or not (design.has_draft_vocabulary or other),
            "own_head is false, but the target's head has other rows or another width",
            "own_head = true, or the target's vocabulary and hidden_size",
        )
        require(
            design.own_embedding or not other,
            "own_embedding is false, but the target's rows have another width",
            "own_embedding = true, or the target's hidden_size",
        )
        require(
            design.num_taps <= facts.num_hidden_layers,
            f"num_taps is {design.num_taps}",
            f"at most the target's {facts.num_hidden_layers} layers",
        )
    if design.family == "medusa":
        require(
            not design.has_draft_vocabulary,
            f"draft_vocab_size is {design.draft_vocab_size:,}, and vLLM 0.31.0 loads no medusa"
            " draft with a cut vocabulary",
            f"the target's {design.vocab_size:,}",
            "Leave draft_vocab_size out.",
        )
    grouped = design.weights in ("w8a16", "w4a16")
    require(
        not design.group_size or grouped,
        f"group_size has no effect with weights = '{design.weights}'",
        "w8a16 or w4a16",
        "Remove it.",
    )
    require(
        design.weights != "w4a16" or design.group_size > 0,
        "group_size is missing",
        "the inputs that share one scale, e.g. 128",
    )
