"""Where a DFlash draft's training starts from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.train.families.dflash import Dflash
from paceline.train.families.eagle3_weights import has_centred_norms
from paceline.train.features import FrozenTarget

__all__ = ["start_dflash_from_target"]


def start_dflash_from_target(
    module: Dflash, frozen: FrozenTarget, *, draft_tokens: Sequence[int] | None
) -> list[str]:
    """What fits of the target, over the weights already there; the names of what was taken.

    Taken: the final norm, head rows of the draft tokens, and for each layer what fits of the
    target's last layers, in their order. `hidden_norm` is the first of them's input norm, and `fc`
    passes the top tap through, so the first keys and values are those of the target's own layer.
    """
    layers = list(frozen.backbone.layers)[-len(module.layers) :]
    source: dict[str, Tensor] = {"norm.weight": frozen.backbone.norm.weight}
    for number, layer in enumerate(layers):
        for name, tensor in layer.state_dict().items():
            source[f"layers.{number}.{name}"] = tensor
    source["hidden_norm.weight"] = source["layers.0.input_layernorm.weight"]
    if has_centred_norms(frozen):
        source = {n: t + 1.0 if "norm" in n and t.ndim == 1 else t for n, t in source.items()}
    if draft_tokens is not None:
        rows = torch.tensor(draft_tokens, device=frozen.head_VD.device)
        source["lm_head.weight"] = frozen.head_VD[rows]
    taken: list[str] = []
    width = module.norm.weight.shape[0]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            tensor = source.get(name)
            if tensor is not None and tensor.shape == parameter.shape:
                parameter.copy_(tensor)
                taken.append(name)
        if module.fc.weight.shape[1] % width == 0:
            module.fc.weight[:, -width:] += torch.eye(width, device=module.fc.weight.device)
    return taken
