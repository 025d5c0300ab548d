"""A draft model's first weights: at random, with the target's ends, or cut from its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import RecipeError
from paceline.train.families.draft_model import DraftModel
from paceline.train.families.eagle3_weights import has_centred_norms
from paceline.train.features import FrozenTarget

__all__ = ["cut_from_target", "spread_layers", "start_draft_model_random", "take_ends"]

_SAME_LAYER = ("llama", "qwen3")


def start_draft_model_random(module: DraftModel, seed: int) -> None:
    """Matrices from a normal of deviation 0.02, biases 0, norms 1; a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def take_ends(module: DraftModel, frozen: FrozenTarget) -> list[str]:
    """Embeddings, output matrix and final norm of the target, where the widths are the same."""
    norm: Tensor = frozen.backbone.norm.weight
    if has_centred_norms(frozen):
        norm = norm + 1.0
    source = {"model.embed_tokens.weight": frozen.embedding_VD, "model.norm.weight": norm}
    if module.lm_head is not None:
        source["lm_head.weight"] = frozen.head_VD
    taken = []
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in source and source[name].shape == parameter.shape:
                parameter.copy_(source[name])
                taken.append(name)
    return taken


def spread_layers(num_layers: int, of: int) -> tuple[int, ...]:
    """num_layers of the target's, the first and the last among them; the middle one for one."""
    if num_layers == 1:
        return (of // 2,)
    return tuple(round(i * (of - 1) / (num_layers - 1)) for i in range(num_layers))


def cut_from_target(module: DraftModel, frozen: FrozenTarget, layers: Sequence[int]) -> list[str]:
    """The target's ends and these of its layers; the names. Raises RecipeError if one differs."""
    kind = getattr(frozen.backbone.config, "model_type", "")
    if kind not in _SAME_LAYER:
        raise RecipeError(
            f"a draft model cannot be cut from a target of model_type '{kind}'",
            expected=f"one of {', '.join(_SAME_LAYER)}, whose layers the draft has too",
            fix='Use [init] from = "target", which takes embeddings, output matrix and norm.',
        )
    taken = take_ends(module, frozen)
    for place, layer in enumerate(module.model.decoder_layers()):
        source = frozen.backbone.layers[layers[place]].state_dict()
        state = layer.state_dict()
        for name in sorted({*state, *source}):
            mine, theirs = state.get(name), source.get(name)
            if mine is None or theirs is None or mine.shape != theirs.shape:
                found = "no such tensor" if theirs is None else f"shape {list(theirs.shape)}"
                wanted = "no such tensor" if mine is None else f"shape {list(mine.shape)}"
                raise RecipeError(
                    f"target layer {layers[place]} does not fit the draft's: '{name}' has {found}",
                    expected=wanted,
                    fix="Leave the sizes out of [draft]: a layer is cut as it is.",
                )
        layer.load_state_dict({name: tensor.float() for name, tensor in source.items()})
        taken += [f"model.layers.{place}.{name}" for name in sorted(source)]
    return sorted(taken)
