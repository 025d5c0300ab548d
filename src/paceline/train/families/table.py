"""The one table of what training does for each family; the rest of the room asks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.draft import (
    build_dflash_config,
    build_draft_model_config,
    build_eagle3_config,
    build_medusa_config,
    build_mtp_config,
    default_aux_layer_ids,
    read_dflash_layer_ids,
)
from paceline.errors import RecipeError
from paceline.target import TargetFacts
from paceline.train.families import (
    dflash,
    dflash_weights,
    draft_model,
    draft_model_weights,
    eagle3,
    eagle3_weights,
    medusa,
    medusa_weights,
    mtp,
    mtp_weights,
)
from paceline.train.families.module import DraftModule
from paceline.train.features import FrozenTarget
from paceline.train.recipe import Recipe
from paceline.train.recipe_checks import EAGLE3_NORMS
from paceline.train.vocabulary import offsets

__all__ = ["FAMILIES", "Family", "Start", "get_family", "start_module"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What first weights are made from. draft_tokens: target ids of a reduced vocabulary."""

    recipe: Recipe
    target: TargetFacts
    frozen: FrozenTarget
    draft_tokens: Sequence[int] | None

    @property
    def seed(self) -> int:
        return self.recipe.seed


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family.

    build_config: config.json for a recipe and a target, every size stated. build_module: the module
    of such a config. draw: fills the module at random, by a seed. starts: what else `init.from` may
    say beside a draft folder; each goes on from drawn weights and answers the names of the tensors
    taken from elsewhere. finish: what every start ends with. tapped_layers: the target's layers
    that it reads, ascending; none means the state after the final norm.
    """

    build_config: Callable[[Recipe, TargetFacts], dict[str, Any]]
    build_module: Callable[[Mapping[str, Any]], DraftModule]
    draw: Callable[[Any, int], None]
    starts: Mapping[str, Callable[[Any, Start], list[str]]]
    finish: Callable[[Any, Start], None] = lambda module, start: None
    tapped_layers: Callable[[Mapping[str, Any]], tuple[int, ...]] = lambda config: ()


def get_family(name: str) -> Family:
    """The row of a family. Raises RecipeError for one without a trainer."""
    if name not in FAMILIES:
        raise RecipeError(
            f"family '{name}' cannot be trained or replayed", expected=f"one of {list(FAMILIES)}"
        )
    return FAMILIES[name]


def start_module(family: Family, module: DraftModule, start: Start) -> list[str]:
    """First weights as `init.from` says, drawn ones for a draft folder that fills them next; the
    names of the tensors taken from elsewhere."""
    source = start.recipe.init.from_
    family.draw(module, start.seed)
    taken = family.starts[source](module, start) if source in family.starts else []
    family.finish(module, start)
    return taken


def _choose_taps(recipe: Recipe, target: TargetFacts) -> tuple[int, ...]:
    ids = recipe.draft.aux_layer_ids
    if ids is None:
        ids = default_aux_layer_ids(target.num_hidden_layers)
    if max(ids) >= target.num_hidden_layers:
        raise RecipeError(
            f"key 'draft.aux_layer_ids' names layer {max(ids)}",
            where=recipe.path,
            expected=f"ids from 0 to {target.num_hidden_layers - 1}, the streams between layers",
        )
    return ids


def _sizes(recipe: Recipe) -> dict[str, Any]:
    """Of a decoder layer; None is the target's."""
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: getattr(recipe.draft, name) for name in names}


def _name_tokens(module: eagle3.Eagle3 | dflash.Dflash, start: Start) -> None:
    if start.draft_tokens is not None:
        module.d2t = torch.tensor(offsets(start.draft_tokens), dtype=torch.int64)


def _eagle3_config(recipe: Recipe, target: TargetFacts) -> dict[str, Any]:
    config = build_eagle3_config(
        target,
        aux_layer_ids=_choose_taps(recipe, target),
        draft_vocab_size=recipe.draft.draft_vocab_size,
        norm_before_residual=recipe.draft.norm_before_residual,
        mask_token_id=recipe.draft.mask_token_id,
        **_sizes(recipe),
    )
    return config | {name: True for name in EAGLE3_NORMS if getattr(recipe.draft, name)}


def _eagle3_start(module: eagle3.Eagle3, start: Start) -> list[str]:
    return eagle3_weights.start_from_target(module, start.frozen, draft_tokens=start.draft_tokens)


def _eagle3_taps(config: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(config.get("eagle_aux_hidden_state_layer_ids") or ())


def _mtp_start(module: mtp.Mtp, start: Start) -> list[str]:
    return mtp_weights.start_from_native(module, start.target)


def _medusa_config(recipe: Recipe, target: TargetFacts) -> dict[str, Any]:
    return build_medusa_config(
        target,
        num_heads=recipe.draft.num_speculative_tokens,
        num_layers=recipe.draft.num_layers or 1,
        one_head=recipe.draft.one_head,
    )


def _medusa_start(module: medusa.Medusa, start: Start) -> list[str]:
    return medusa_weights.start_medusa_from_target(module, start.frozen)


def _medusa_finish(module: medusa.Medusa, start: Start) -> None:
    if not start.recipe.draft.trains_head:
        module.freeze_output()


def _draft_model_config(recipe: Recipe, target: TargetFacts) -> dict[str, Any]:
    return build_draft_model_config(
        target,
        num_layers=recipe.draft.num_layers or 1,
        hidden_size=recipe.draft.hidden_size,
        own_head=recipe.draft.own_head,
        **_sizes(recipe),
    )


def _draft_model_start(module: draft_model.DraftModel, start: Start) -> list[str]:
    return draft_model_weights.take_ends(module, start.frozen)


def _draft_model_cut(module: draft_model.DraftModel, start: Start) -> list[str]:
    num_layers, top = len(module.model.layers), start.target.num_hidden_layers
    layers = start.recipe.init.layers or draft_model_weights.spread_layers(num_layers, top)
    if len(layers) != num_layers or not all(0 <= layer < top for layer in layers):
        raise RecipeError(
            f"key 'init.layers' is {list(layers)}",
            where=start.recipe.path,
            expected=f"{num_layers} layers of the target from 0 to {top - 1}, as draft.num_layers",
        )
    return draft_model_weights.cut_from_target(module, start.frozen, layers)


def _dflash_config(recipe: Recipe, target: TargetFacts) -> dict[str, Any]:
    shape = recipe.draft
    assert shape.mask_token_id is not None  # required of this family
    return build_dflash_config(
        target,
        aux_layer_ids=_choose_taps(recipe, target),
        mask_token_id=shape.mask_token_id,
        num_speculative_tokens=shape.num_speculative_tokens,
        num_hidden_layers=shape.num_layers or 1,
        draft_vocab_size=shape.draft_vocab_size,
        causal=shape.causal,
        sliding_window=shape.sliding_window,
        **_sizes(recipe),
    )


def _dflash_start(module: dflash.Dflash, start: Start) -> list[str]:
    return dflash_weights.start_dflash_from_target(
        module, start.frozen, draft_tokens=start.draft_tokens
    )


def _dflash_taps(config: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(read_dflash_layer_ids(config) or ())


FAMILIES: dict[str, Family] = {
    "eagle3": Family(
        build_config=_eagle3_config,
        build_module=eagle3.build_module,
        draw=eagle3_weights.start_random,
        starts={"target": _eagle3_start},
        finish=_name_tokens,
        tapped_layers=_eagle3_taps,
    ),
    "mtp": Family(
        build_config=lambda recipe, target: build_mtp_config(target),
        build_module=mtp.build_module,
        draw=mtp_weights.start_mtp_random,
        starts={"target": _mtp_start},
    ),
    "medusa": Family(
        build_config=_medusa_config,
        build_module=medusa.build_module,
        draw=medusa_weights.start_medusa_random,
        starts={"target": _medusa_start},
        finish=_medusa_finish,
    ),
    "draft_model": Family(
        build_config=_draft_model_config,
        build_module=draft_model.build_module,
        draw=draft_model_weights.start_draft_model_random,
        starts={"target": _draft_model_start, "target-layers": _draft_model_cut},
    ),
    "dflash": Family(
        build_config=_dflash_config,
        build_module=dflash.build_module,
        draw=eagle3_weights.start_random,
        starts={"target": _dflash_start},
        finish=_name_tokens,
        tapped_layers=_dflash_taps,
    ),
}
