"""What a recipe may say: ranges, and which family reads which setting."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from paceline.errors import RecipeError
from paceline.methods import METHODS
from paceline.train.schedule import SCHEDULES

if TYPE_CHECKING:
    from paceline.train.recipe import Recipe

__all__ = ["EAGLE3_NORMS", "INIT_WORDS", "check_recipe", "wrong_key"]

# what `init.from` may say beside a draft folder, and for which families
INIT_WORDS: dict[str, tuple[str, ...]] = {
    "target": ("eagle3", "mtp", "medusa", "draft_model", "dflash"),
    "random": ("eagle3", "mtp", "medusa", "draft_model", "dflash"),
    "target-layers": ("draft_model",),
}
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_TAPPED = ("draft_vocab_size", *_SIZES, "aux_layer_ids", "mask_token_id")
EAGLE3_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
# the keys of [draft] that each family reads beside num_speculative_tokens
_SHAPE_KEYS: dict[str, tuple[str, ...]] = {
    "eagle3": (*_TAPPED, "norm_before_residual", *EAGLE3_NORMS, "parallel"),
    "medusa": ("num_layers", "one_head", "trains_head"),
    "draft_model": ("num_layers", "hidden_size", *_SIZES, "own_head"),
    "dflash": (*_TAPPED, "num_layers", "causal", "sliding_window"),
    "mtp": (),  # vLLM builds an MTP head from the target's own config
}


def wrong_key(where: str, key: str, what: str, expected: str) -> RecipeError:
    return RecipeError(f"key '{key}' {what}", where=where, expected=expected)


def _numbers(values: tuple[Any, ...]) -> bool:
    return all(type(v) in (int, float) and math.isfinite(v) for v in values)


def check_recipe(recipe: Recipe, where: str) -> None:
    """Raises RecipeError for the first setting that is wrong, or would have no effect."""
    trained = [m.name for m in METHODS.values() if m.trains]
    optim, draft, loss = recipe.optim, recipe.draft, recipe.loss
    ids, weights = draft.aux_layer_ids, loss.position_weights
    num_tokens, num_weights = draft.num_speculative_tokens, recipe.num_unrolled
    parts = (loss.soft, loss.hard, loss.variation, loss.reverse, loss.overlap, loss.hybrid)
    checks: list[tuple[bool, str, object, str]] = [
        (recipe.family in trained, "family", recipe.family, f"one of {trained}"),
        (recipe.dtype in ("bfloat16", "float32"), "dtype", recipe.dtype, "bfloat16 or float32"),
        (num_tokens >= 1, "draft.num_speculative_tokens", num_tokens, "at least 1"),
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
        (
            optim.schedule in SCHEDULES,
            "optim.schedule",
            optim.schedule,
            f"one of {list(SCHEDULES)}",
        ),
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
        (
            optim.tokens_per_part is None
            or optim.max_length <= optim.tokens_per_part < optim.tokens_per_batch,
            "optim.tokens_per_part",
            optim.tokens_per_part,
            f"from max_length = {optim.max_length} to below tokens_per_batch = "
            f"{optim.tokens_per_batch}",
        ),
        (optim.checkpoint_steps >= 1, "optim.checkpoint_steps", optim.checkpoint_steps, ">= 1"),
        (min(parts) >= 0, "loss.soft", parts, "the weight of no term below 0"),
        (
            loss.hybrid_eta == type(loss).hybrid_eta or (loss.hybrid > 0 and loss.hybrid_eta >= 0),
            "loss.hybrid_eta",
            loss.hybrid_eta,
            "a number from 0, beside loss.hybrid above 0",
        ),
        (
            loss.pace_alpha is None or 0 < loss.pace_alpha <= 1,
            "loss.pace_alpha",
            loss.pace_alpha,
            "above 0, at most 1",
        ),
        (
            loss.pace_alpha is None or (num_weights > 1 and set(weights) <= {1.0}),
            "loss.pace_alpha",
            loss.pace_alpha,
            "several steps of training, and no position_weights, which it stands in for",
        ),
        (sum(parts) > 0, "loss.soft", parts, "a loss above 0"),
        (
            not weights or (len(weights) == num_weights and _numbers(weights) and min(weights) > 0),
            "loss.position_weights",
            weights,
            f"{num_weights} positive numbers, one a step of training",
        ),
    ]
    for name in (*_SIZES[:3], "num_layers", "hidden_size", "sliding_window"):
        size = getattr(draft, name)
        checks.append((size is None or size >= 1, f"draft.{name}", size, "at least 1"))
    width = draft.head_dim
    even = width is None or (width >= 2 and width % 2 == 0)
    checks.append((even, "draft.head_dim", width, "an even number above 0"))
    for name in ("num_epochs", "num_steps", "anchors_per_row"):
        count = getattr(optim, name)
        checks.append((count is None or count >= 1, f"optim.{name}", count, "at least 1"))
    for holds, key, found, expected in checks:
        if not holds:
            raise wrong_key(where, key, f"is {found!r}", expected)
    _check_family(recipe, where)


def _check_mask(recipe: Recipe, where: str) -> None:
    """The token of slots still to come: named where there are such slots, and only there."""
    token = recipe.draft.mask_token_id
    fills = recipe.family == "dflash" or recipe.draft.parallel
    if fills and (token is None or token < 0):
        raise wrong_key(
            where,
            "draft.mask_token_id",
            "is missing" if token is None else f"is {token}",
            "the id of a token of the target's that never stands in its texts",
        )
    if token is not None and not fills:
        raise wrong_key(
            where, "draft.mask_token_id", "has no effect without draft.parallel", "no such key"
        )


def _check_family(recipe: Recipe, where: str) -> None:
    """Settings of other families, which would have no effect."""
    read = _SHAPE_KEYS[recipe.family]
    for entry in dataclasses.fields(recipe.draft):
        if entry.default is dataclasses.MISSING or entry.name in read:
            continue
        if getattr(recipe.draft, entry.name) != entry.default:
            raise wrong_key(
                where,
                f"draft.{entry.name}",
                f"has no effect on family {recipe.family}",
                f"only {', '.join(('num_speculative_tokens', *read))}",
            )
    _check_mask(recipe, where)
    if recipe.draft.norm_output and (recipe.draft.parallel or recipe.num_unrolled == 1):
        what = "has no effect where no step reads an earlier one's output"
        raise wrong_key(where, "draft.norm_output", what, "no such key")
    source, layers = recipe.init.from_, recipe.init.layers
    if layers is not None and (source != "target-layers" or not layers):
        raise wrong_key(
            where, "init.layers", f"is {list(layers)!r}", 'layers, with from = "target-layers"'
        )
    if source in INIT_WORDS and recipe.family not in INIT_WORDS[source]:
        able = [word for word, families in INIT_WORDS.items() if recipe.family in families]
        raise wrong_key(where, "init.from", f"is {source!r}", f"one of {able}, or a draft folder")
