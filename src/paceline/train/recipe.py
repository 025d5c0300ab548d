"""A recipe: everything a training run does that the data and the target do not fix.

    family = "eagle3"
    seed = 0
    dtype = "bfloat16"              # arithmetic; parameters and optimiser stay float32

    [init]
    from = "target"                 # "target", "random", or a draft folder

    [draft]
    draft_vocab_size = 8192         # left out: the target's whole vocabulary, its own head shared
    intermediate_size = 1536        # left out: the target's; so are the three below
    num_attention_heads = 9
    num_key_value_heads = 3         # fewer or narrower ones: a smaller cache
    head_dim = 64
    aux_layer_ids = [2, 15, 27]     # i = the residual stream after i target layers
    num_speculative_tokens = 3

    [optim]
    lr = 1e-3
    warmup_steps = 20
    schedule = "cosine"             # "cosine", "linear", "constant"; counted in steps
    num_epochs = 4                  # or num_steps, not both
    tokens_per_batch = 2048
    max_length = 512

    [loss]
    soft = 1.0                      # KL to the target's distribution
    hard = 0.1                      # cross-entropy to the target's likeliest token
    variation = 0.0                 # total variation: what sampled serving rejects
    reverse = 0.0                   # KL the other way round
    position_weights = [1.0, 0.8, 0.64]

A key this file does not know is an error: it would have had no effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline.methods import METHODS

__all__ = [
    "INIT_WORDS",
    "DraftShape",
    "Init",
    "LossMix",
    "Optim",
    "Recipe",
    "build_recipe",
    "learning_rate",
    "read_recipe",
    "recipe_sha256",
]


# what `init.from` may say beside a draft folder, and for which families
INIT_WORDS: dict[str, tuple[str, ...]] = {
    "target": ("eagle3", "mtp", "medusa"),
    "random": ("eagle3", "mtp", "medusa"),
}
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# the keys of [draft] that each family reads beside num_speculative_tokens
_SHAPE_KEYS: dict[str, tuple[str, ...]] = {
    "eagle3": ("draft_vocab_size", *_SIZES, "aux_layer_ids", "norm_before_residual"),
    "medusa": ("num_layers", "one_head", "trains_head"),
    "mtp": (),  # vLLM builds an MTP head from the target's own config
}


@dataclass(frozen=True, kw_only=True)
class Init:
    """Where the first weights come from.

    from_: "target" (norms and the last layer's attention and MLP of the target, fresh `fc`),
    "random", or the path of a draft folder of the same shape.
    """

    from_: str = "target"


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The draft's own sizes; None takes the target's.

    num_layers: Medusa's residual layers a head, 1. one_head: its heads end in one output matrix.
    trains_head: that matrix is trained too, not kept as the target's.
    """

    num_speculative_tokens: int
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    num_layers: int | None = None
    one_head: bool = True
    trains_head: bool = True


@dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW and the length of the run. tokens_per_batch counts padded tokens of whole rows."""

    lr: float
    tokens_per_batch: int
    max_length: int
    num_epochs: int | None = None
    num_steps: int | None = None
    warmup_steps: int = 0
    schedule: str = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    checkpoint_steps: int = 100
    feature_cache_bytes: int = 2 * 1024**3


@dataclass(frozen=True, kw_only=True)
class LossMix:
    """Weights of the terms (losses.py), and one weight an unroll position."""

    soft: float = 1.0
    hard: float = 0.1
    variation: float = 0.0
    reverse: float = 0.0
    position_weights: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training recipe, complete. `path` is where it was read, for messages only."""

    family: str
    draft: DraftShape
    optim: Optim
    init: Init = field(default_factory=Init)
    loss: LossMix = field(default_factory=LossMix)
    seed: int = 0
    dtype: str = "bfloat16"
    path: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The settings alone, as JSON types; equal for equal runs wherever the file lay."""
        value = dataclasses.asdict(self)
        del value["path"]
        value["init"] = {"from": value["init"]["from_"]}
        result: dict[str, Any] = json.loads(json.dumps(value))
        return result


_TABLES: dict[str, type] = {"init": Init, "draft": DraftShape, "optim": Optim, "loss": LossMix}
_TOP = ("family", "seed", "dtype")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "from_": str,
    "schedule": str,
    "lr": (int, float),
    "weight_decay": (int, float),
    "grad_clip": (int, float),
    "soft": (int, float),
    "hard": (int, float),
    "variation": (int, float),
    "reverse": (int, float),
    "betas": list,
    "position_weights": list,
    "aux_layer_ids": list,
    "norm_before_residual": bool,
    "one_head": bool,
    "trains_head": bool,
}


def read_recipe(path: str | Path) -> Recipe:
    """Reads a recipe file. Raises RecipeError naming the key and the file."""
    path = Path(path)
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError("the recipe does not exist", where=str(path)) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RecipeError(f"cannot be read: {problem}", where=str(path)) from None
    return build_recipe(value, where=str(path))


def build_recipe(value: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Builds a Recipe from parsed TOML and checks it. Raises RecipeError."""
    for key in value:
        if key not in _TOP and key not in _TABLES:
            raise _wrong(where, key, "is not a recipe key", f"one of {[*_TOP, *_TABLES]}")
    tables = {name: _table(value, name, where) for name in _TABLES}
    top = {key: value[key] for key in _TOP if key in value}
    if not isinstance(top.get("family"), str):
        raise _wrong(where, "family", "is missing", 'a family, such as "eagle3"')
    if type(top.get("seed", 0)) is not int:
        raise _wrong(where, "seed", f"is {top['seed']!r}", "a whole number")
    recipe = Recipe(**top, **tables, path=where)
    _check(recipe, where)
    if not recipe.loss.position_weights:
        weights = tuple(0.8**i for i in range(recipe.draft.num_speculative_tokens))
        mix = dataclasses.replace(recipe.loss, position_weights=weights)
        recipe = dataclasses.replace(recipe, loss=mix)
    return recipe


def _wrong(where: str, key: str, what: str, expected: str) -> RecipeError:
    return RecipeError(f"key '{key}' {what}", where=where, expected=expected)


def _table(value: Mapping[str, Any], name: str, where: str) -> Any:
    given = value.get(name, {})
    if not isinstance(given, Mapping):
        raise _wrong(where, name, f"is {given!r}", f"a table [{name}]")
    kind = _TABLES[name]
    known = {f.name.rstrip("_"): f for f in dataclasses.fields(kind)}
    settings: dict[str, Any] = {}
    for key, setting in given.items():
        if key not in known:
            raise _wrong(where, f"{name}.{key}", "is not a recipe key", f"one of {sorted(known)}")
        wanted = _TYPES.get(known[key].name, int)
        if isinstance(setting, bool) != (wanted is bool) or not isinstance(setting, wanted):
            raise _wrong(where, f"{name}.{key}", f"is {setting!r}", _describe(wanted))
        settings[known[key].name] = tuple(setting) if isinstance(setting, list) else setting
    for key, entry in known.items():
        required = (
            entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        )
        if required and entry.name not in settings:
            raise _wrong(where, f"{name}.{key}", "is missing", "a value")
    return kind(**settings)


def _describe(wanted: type | tuple[type, ...]) -> str:
    names = {int: "a whole number", str: "a string", list: "a list", bool: "true or false"}
    return "a number" if isinstance(wanted, tuple) else names[wanted]


def _numbers(values: tuple[Any, ...]) -> bool:
    return all(type(v) in (int, float) and math.isfinite(v) for v in values)


def _check(recipe: Recipe, where: str) -> None:
    trained = [m.name for m in METHODS.values() if m.trains]
    optim, draft, loss = recipe.optim, recipe.draft, recipe.loss
    ids, weights = draft.aux_layer_ids, loss.position_weights
    num_weights = draft.num_speculative_tokens
    parts = (loss.soft, loss.hard, loss.variation, loss.reverse)
    checks: list[tuple[bool, str, object, str]] = [
        (recipe.family in trained, "family", recipe.family, f"one of {trained}"),
        (recipe.dtype in ("bfloat16", "float32"), "dtype", recipe.dtype, "bfloat16 or float32"),
        (num_weights >= 1, "draft.num_speculative_tokens", num_weights, "at least 1"),
        (
            ids is None or (len(ids) > 0 and list(ids) == sorted({i for i in ids if i >= 0})),
            "draft.aux_layer_ids",
            ids,
            "layer ids from 0, ascending, each once (vLLM sorts and removes doubles)",
        ),
        (
            (optim.num_epochs is None) != (optim.num_steps is None),
            "optim.num_epochs",
            f"{optim.num_epochs} and num_steps {optim.num_steps}",
            "one of the two",
        ),
        (math.isfinite(optim.lr) and optim.lr > 0, "optim.lr", optim.lr, "above 0"),
        (optim.warmup_steps >= 0, "optim.warmup_steps", optim.warmup_steps, "at least 0"),
        (optim.schedule in _SHAPES, "optim.schedule", optim.schedule, f"one of {list(_SHAPES)}"),
        (
            len(optim.betas) == 2
            and _numbers(optim.betas)
            and all(0 <= b < 1 for b in optim.betas),
            "optim.betas",
            optim.betas,
            "two numbers from 0 to below 1",
        ),
        (optim.weight_decay >= 0, "optim.weight_decay", optim.weight_decay, "at least 0"),
        (optim.grad_clip > 0, "optim.grad_clip", optim.grad_clip, "above 0"),
        (optim.max_length >= 4, "optim.max_length", optim.max_length, "at least 4 tokens"),
        (
            optim.tokens_per_batch >= optim.max_length,
            "optim.tokens_per_batch",
            optim.tokens_per_batch,
            f"at least max_length = {optim.max_length}",
        ),
        (optim.checkpoint_steps >= 1, "optim.checkpoint_steps", optim.checkpoint_steps, ">= 1"),
        (min(parts) >= 0, "loss.soft", parts, "soft, hard, variation, reverse: not negative"),
        (sum(parts) > 0, "loss.soft", parts, "a loss above 0"),
        (
            not weights or (len(weights) == num_weights and _numbers(weights) and min(weights) > 0),
            "loss.position_weights",
            weights,
            f"{num_weights} positive numbers, one a drafted token",
        ),
    ]
    for name in (*_SIZES[:3], "num_layers"):
        size = getattr(draft, name)
        checks.append((size is None or size >= 1, f"draft.{name}", size, "at least 1"))
    width = draft.head_dim
    even = width is None or (width >= 2 and width % 2 == 0)
    checks.append((even, "draft.head_dim", width, "an even number above 0"))
    for name in ("num_epochs", "num_steps"):
        count = getattr(optim, name)
        checks.append((count is None or count >= 1, f"optim.{name}", count, "at least 1"))
    for holds, key, found, expected in checks:
        if not holds:
            raise _wrong(where, key, f"is {found!r}", expected)
    _check_family(recipe, where)


def _check_family(recipe: Recipe, where: str) -> None:
    """Settings of other families, which would have no effect."""
    read = _SHAPE_KEYS[recipe.family]
    for entry in dataclasses.fields(recipe.draft):
        if entry.default is dataclasses.MISSING or entry.name in read:
            continue
        if getattr(recipe.draft, entry.name) != entry.default:
            raise _wrong(
                where,
                f"draft.{entry.name}",
                f"has no effect on family {recipe.family}",
                f"only {', '.join(('num_speculative_tokens', *read))}",
            )
    source = recipe.init.from_
    if source in INIT_WORDS and recipe.family not in INIT_WORDS[source]:
        able = [word for word, families in INIT_WORDS.items() if recipe.family in families]
        raise _wrong(where, "init.from", f"is {source!r}", f"one of {able}, or a draft folder")


_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done: 1.0 - done,
    "constant": lambda done: 1.0,
}


def learning_rate(optim: Optim, step: int, *, num_steps: int) -> float:
    """The rate step `step` uses, counted from 1: a ramp, then the schedule down to 0.

    A pure function of the step number, so a resumed run cannot get it wrong (U29): warmup 5,
    20 steps, linear, peak 1e-3 gives 6.667e-4 at step 10.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, num_steps - optim.warmup_steps)
    return optim.lr * _SHAPES[optim.schedule](min(1.0, done))


def recipe_sha256(recipe: Recipe) -> str:
    """Hash of the settings, not of the file's spacing."""
    text = json.dumps(recipe.as_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
