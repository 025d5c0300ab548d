"""What the frozen target knows about a text: tapped layers, final state, likeliest next tokens.

Tap i is the residual stream after i layers (0 = the embeddings), vLLM's numbering and transformers'
`hidden_states[i]`. The teacher of position t+1 is lm_head(final norm(stream)) at t.

Shapes: B rows, T tokens, D target hidden, F = taps * D, M positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RecipeError, TargetError
from paceline.target import TargetFacts
from paceline.train.quantized_target import is_quantized, load_dequantized

__all__ = ["FrozenTarget", "TextFeatures", "keep_ends", "likeliest", "load_frozen_target"]


@dataclass(frozen=True, kw_only=True)
class TextFeatures:
    """taps_BTF: concatenated taps, ascending; final_BTD: after the target's final norm.

    Without taps (an MTP head has none) taps_BTF is the final state, what such a head reads.
    """

    taps_BTF: Tensor
    final_BTD: Tensor


@dataclass(frozen=True, kw_only=True)
class FrozenTarget:
    """The target through transformers, without gradients. Embedding and head may be one tensor.

    is_spread: its layers lie on several processes, which call it equally often (sharding.py).
    """

    backbone: Any
    embedding_VD: Tensor
    head_VD: Tensor
    num_layers: int
    is_spread: bool = False

    def features(self, tokens_BT: Tensor, aux_layer_ids: Sequence[int]) -> TextFeatures:
        """Right-padded texts in, features out; positions count from 0 in every row."""
        for layer in aux_layer_ids:
            if not 0 <= layer < self.num_layers:
                raise RecipeError(
                    f"key 'draft.aux_layer_ids' names layer {layer}",
                    expected=f"0 to {self.num_layers - 1} (the target has {self.num_layers})",
                )
        with torch.no_grad():
            output = self.backbone(
                input_ids=tokens_BT, output_hidden_states=True, use_cache=False, return_dict=True
            )
            final = output.last_hidden_state
            taps = [output.hidden_states[i] for i in aux_layer_ids] or [final]
        return TextFeatures(taps_BTF=torch.cat(taps, dim=-1), final_BTD=final)


def load_frozen_target(
    target: TargetFacts, *, device: str | torch.device, dtype: torch.dtype
) -> FrozenTarget:
    """Loads the target's own weights, no remote code. Raises TargetError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    # Gated DeltaNet without its CUDA kernels: correct, and meant to be so on a CPU.
    transformers_logging.get_logger("transformers.integrations.hub_kernels").setLevel("ERROR")
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        if is_quantized(target):
            model = load_dequantized(target, dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                str(target.path), dtype=dtype, trust_remote_code=False, use_safetensors=True
            )
    except TargetError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as problem:
        reason = str(problem).split("\n")[0]
        raise TargetError(
            f"transformers cannot load the target: {reason}", where=str(target.path)
        ) from problem
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    model = model.to(device).eval().requires_grad_(False)
    return FrozenTarget(
        backbone=model.model,
        embedding_VD=model.get_input_embeddings().weight.detach(),
        head_VD=model.get_output_embeddings().weight.detach(),
        num_layers=target.num_hidden_layers,
    )


def keep_ends(frozen: FrozenTarget, *, device: torch.device) -> FrozenTarget:
    """Embedding and output matrix alone, on the device: all that stored states leave to ask for."""
    embedding_VD = frozen.embedding_VD.to(device, copy=True)
    tied = frozen.head_VD.data_ptr() == frozen.embedding_VD.data_ptr()
    head_VD = embedding_VD if tied else frozen.head_VD.to(device, copy=True)
    return dataclasses.replace(frozen, backbone=None, embedding_VD=embedding_VD, head_VD=head_VD)


def likeliest(final_MD: Tensor, head_VD: Tensor, *, chunk: int) -> Tensor:
    """The target's greedy token after each state, over its whole vocabulary: ids [M]."""
    parts = [
        (final_MD[start : start + chunk] @ head_VD.T).argmax(-1)
        for start in range(0, len(final_MD), chunk)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
