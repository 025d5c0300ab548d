"""A quantised target for training and replay: its matrices as the plain ones that they stand for.

transformers runs such folders with kernels of its own, or not at all; what is needed here are the
states of the very weights that are served. Inputs are not rounded (w8a8 and fp8 round them when
served), so states differ from the served ones by that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.draft import dequantize_tensors
from paceline.errors import TargetError
from paceline.target import TargetFacts

__all__ = ["is_quantized", "load_dequantized"]


def is_quantized(target: TargetFacts) -> bool:
    """Whether the folder is in the compressed-tensors format, which `paceline quantize` writes."""
    settings = target.config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == "compressed-tensors"


def load_dequantized(target: TargetFacts, dtype: torch.dtype) -> Any:
    """The transformers model, on the CPU. Raises TargetError for tensors that do not fit it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(target.path), trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = dequantize_tensors(_read_all(target))
    state = {name: t.to(dtype) for name, t in tensors.items() if not name.startswith("mtp.")}
    outcome = model.load_state_dict(state, strict=False)
    tied = ("lm_head.weight",) if target.tie_word_embeddings else ()
    missing = [name for name in outcome.missing_keys if name not in tied]
    wrong = [*missing, *outcome.unexpected_keys]
    if wrong:
        raise TargetError(
            f"tensor '{wrong[0]}' of the quantised target has no place in transformers' model"
            if wrong[0] in outcome.unexpected_keys
            else f"tensor '{wrong[0]}' is missing from the quantised target",
            where=str(target.path),
            expected="a text-only target that `paceline quantize` wrote",
        )
    model.tie_weights()
    return model


def _read_all(target: TargetFacts) -> dict[str, Tensor]:
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for file in sorted(target.path.glob("*.safetensors")):
        with safe_open(str(file.resolve()), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                tensors[name] = opened.get_tensor(name)
    return tensors
