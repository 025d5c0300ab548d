"""EAGLE-3 weights: where training starts from, a folder read back, and what is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.draft import Draft, build_contract, dequantize_tensors, read_tensors
from paceline.errors import RecipeError
from paceline.train.families.eagle3 import Eagle3
from paceline.train.families.module import DraftModule, TappedDraft
from paceline.train.features import FrozenTarget

# Model types whose norms scale by 1 + weight; a Llama draft's norms scale by the weight.
_CENTRED_NORMS = ("qwen3_5", "qwen3_next")
# what no tensor shows
_MEANINGS = ("norm_before_residual", "norm_output")

__all__ = [
    "export_tensors",
    "has_centred_norms",
    "load_draft_tensors",
    "start_from_draft",
    "start_from_target",
    "start_random",
]


def has_centred_norms(frozen: FrozenTarget) -> bool:
    """The target's norms scale by 1 + weight."""
    return str(getattr(frozen.backbone.config, "model_type", "")).startswith(_CENTRED_NORMS)


def start_random(module: DraftModule, seed: int) -> None:
    """Matrices from a normal of deviation 0.02, norms at 1; a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)


def start_from_target(
    module: Eagle3, frozen: FrozenTarget, *, draft_tokens: Sequence[int] | None
) -> list[str]:
    """Whatever of the target fits goes over drawn weights; names of the tensors taken from it.

    Taken: the final norm, head rows of the draft tokens, and the last layer's MLP, norms, output
    projection and (for the half that reads the features) query, key and value projections. `fc`
    passes the top tap through and mixes the others in from random, so the first features are states
    the last layer knows.
    """
    taken: list[str] = []
    last = frozen.backbone.layers[-1]
    source: dict[str, Tensor] = {"norm.weight": frozen.backbone.norm.weight}
    for name, tensor in last.state_dict().items():
        source[f"midlayer.{name}"] = tensor
    if has_centred_norms(frozen):
        source = {n: t + 1.0 if "norm" in n and t.ndim == 1 else t for n, t in source.items()}
    hidden_norm = source.pop("midlayer.input_layernorm.weight", None)
    if hidden_norm is not None:
        source["midlayer.hidden_norm.weight"] = hidden_norm
    if draft_tokens is not None:
        rows = torch.tensor(draft_tokens, device=frozen.head_VD.device)
        source["lm_head.weight"] = frozen.head_VD[rows]
    width = module.norm.weight.shape[0]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            tensor = source.get(name)
            if tensor is None:
                continue
            tensor = tensor.to(parameter.device, parameter.dtype)
            if tensor.shape == parameter.shape:
                parameter.copy_(tensor)
            elif tensor.shape == (parameter.shape[0], width) and parameter.shape[1] == 2 * width:
                parameter[:, width:].copy_(tensor)
            else:
                continue
            taken.append(name)
        if module.fc.weight.shape[1] % width == 0:
            module.fc.weight[:, -width:] += torch.eye(width, device=module.fc.weight.device)
    return taken


def load_draft_tensors(draft: Draft) -> dict[str, Tensor]:
    """The tensors of a draft folder that vLLM reads, under their canonical names, on the CPU;
    quantised matrices as the plain ones that they stand for."""
    rules = build_contract(draft.family, draft.config).tensors
    return {
        name: tensor
        for name, tensor in dequantize_tensors(read_tensors(draft)).items()
        if name != "t2d" and not (name in rules and rules[name].unread)
    }


def start_from_draft(
    module: DraftModule, draft: Draft, frozen: FrozenTarget, config: Mapping[str, Any]
) -> None:
    """Copies a folder's weights; every shape must be the recipe's. Raises RecipeError.

    Ends that the folder holds and that are the target's own, number for number, stay shared.
    """
    for key in _MEANINGS:
        if bool(draft.config.get(key)) != bool(config.get(key)):
            raise RecipeError(
                f"the draft to start from has {key} = {json.dumps(bool(draft.config.get(key)))}, "
                "the recipe has not",
                where=str(draft.path),
                expected="a draft that computes what it was trained to",
                fix=f"Give [draft] the same {key}.",
            )
    tensors = load_draft_tensors(draft)
    ends = {"embed_tokens.weight": frozen.embedding_VD, "lm_head.weight": frozen.head_VD}
    state: dict[str, Any] = module.state_dict()
    for name, shared in ends.items() if isinstance(module, TappedDraft) else ():
        given = None if name in state else tensors.get(name)
        if given is not None and torch.equal(given, shared.to(given.device, given.dtype)):
            del tensors[name]
    for name, tensor in state.items():
        given = tensors.get(name)
        if given is None or given.shape != tensor.shape:
            found = "is missing" if given is None else f"has shape {list(given.shape)}"
            raise RecipeError(
                f"the draft to start from does not fit: tensor '{name}' {found}",
                where=str(draft.path),
                expected=f"shape {list(tensor.shape)}",
                fix="Give [draft] the sizes of that folder, or start from the target.",
            )
    extra = sorted(set(tensors) - set(state))
    if extra:
        raise RecipeError(
            f"the draft to start from has a tensor '{extra[0]}' that this shape does not use",
            where=str(draft.path),
        )
    module.load_state_dict(tensors)


def export_tensors(module: DraftModule, dtype: torch.dtype) -> dict[str, Tensor]:
    """What goes into model.safetensors: weights in the served dtype, d2t as int64."""
    return {
        name: tensor.detach().cpu().to(dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in module.state_dict().items()
    }
