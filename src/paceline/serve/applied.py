"""The matrices that an engine multiplies by, read back through its own kernels.

A kernel repacks a quantised weight in an order of its own when it is loaded, and the files' tensors
are gone. One-hot inputs through the layer give the matrix again, exactly: each sum has one product,
every other is zero. Where inputs are quantised too, the largest one has the scale one, and nothing
is rounded. AppliedWeights runs inside vLLM's worker, in the inspector's place.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.draft import dequantize_tensors
from paceline.serve.endpoint import VllmEndpoint
from paceline.serve.inspector import Inspector
from paceline.serve.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AppliedWeights", "find_altered_weights", "with_applied_weights"]

_CLASS = "paceline.serve.applied.AppliedWeights"
# the input whose scale is one, by the scheme's class in vLLM and by the dtype in the file
_ONES = {"CompressedTensorsW8A8Int8": 127.0, "CompressedTensorsW8A8Fp8": 448.0}
_FILED_ONES = {"int8": 127.0, "float8_e4m3fn": 448.0}
_ROWS_AT_ONCE = 1024
_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(?:\w+\.)?(\w+)$")
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}


class AppliedWeights(Inspector):
    """Adds one call, after loading."""

    def paceline_applied(self) -> dict[str, str]:
        """Place of each quantised matrix of the target -> sha256 of what it multiplies by."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        found = {}
        for name, module in runner.get_model().named_modules():
            if not isinstance(module, LinearBase | ParallelLMHead):
                continue
            if getattr(module, "scheme", None) is not None:
                found[_find_place(name)] = _hash(_apply_one_hot(module, runner.device))
        return found


def _apply_one_hot(module: Any, device: Any) -> Tensor:
    """[rows, columns] in bfloat16, rows as in the folder."""
    import torch

    columns = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    rows = getattr(module, "org_vocab_size", None)
    one = _ONES.get(type(module.scheme).__name__, 1.0)
    parts = []
    with torch.no_grad():
        for begin in range(0, columns, _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, columns - begin)
            inputs = torch.zeros(count, columns, dtype=torch.bfloat16, device=device)
            inputs[range(count), range(begin, begin + count)] = one
            parts.append(module.quant_method.apply(module, inputs, None)[:, :rows].cpu())
    return torch.cat(parts).T.contiguous()


def _hash(matrix: Tensor) -> str:
    import torch

    # zero has one sign here: a code of zero and one of minus zero are the same
    plain = (matrix.to(torch.bfloat16) + 0.0).contiguous()
    return hashlib.sha256(plain.view(torch.int16).numpy().tobytes()).hexdigest()


def _find_place(name: str) -> str:
    """ "12.qkv_proj" of a layer's module in the engine or a folder; "lm_head"."""
    found = _LAYER.match(name)
    return f"{found[1]}.{found[2]}" if found else name.rpartition(".")[2]


def with_applied_weights(plan: Plan) -> Plan:
    """The plan with the reader in its worker; all else is the same."""
    return replace(plan, engine_args={**plan.engine_args, "worker_extension_cls": _CLASS})


def find_altered_weights(endpoint: VllmEndpoint, folder: Path) -> tuple[int, list[str]]:
    """(matrices that the engine multiplies by as `folder` holds them, places of those it does not).

    endpoint: planned `with_applied_weights`. Bit for bit in bfloat16, fused as vLLM fuses.
    """
    applied: dict[str, str] = endpoint.inspect("paceline_applied")
    filed = _hash_folder(folder)
    altered = sorted(p for p in filed.keys() | applied.keys() if filed.get(p) != applied.get(p))
    return len(filed) - sum(place in filed for place in altered), altered


def _hash_folder(folder: Path) -> dict[str, str]:
    """Place -> sha256 of what the engine should multiply by, for every quantised matrix."""
    import torch
    from safetensors import safe_open

    parts: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            names = list(opened.keys())
            for stem in (n.removesuffix("weight_scale") for n in names if n.endswith("_scale")):
                own = {n: opened.get_tensor(n) for n in names if n.startswith(f"{stem}weight")}
                parts[_find_place(stem[:-1])] = _multiply(stem, own)
    whole: dict[str, str] = {}
    for place, matrix in parts.items():
        layer, _, leaf = place.rpartition(".")
        fused = next((name for name, leaves in _FUSED.items() if leaf in leaves), None)
        if fused is None:
            whole[place] = _hash(matrix)
        elif leaf == _FUSED[fused][0]:
            members = [parts[f"{layer}.{member}"] for member in _FUSED[fused]]
            whole[f"{layer}.{fused}"] = _hash(torch.cat(members))
    return whole


def _multiply(stem: str, tensors: dict[str, Tensor]) -> Tensor:
    """What the one input gives: the matrix times the input, in float32 or the scale's dtype."""
    stored = tensors.get(f"{stem}weight")
    one = 1.0 if stored is None else _FILED_ONES[str(stored.dtype).removeprefix("torch.")]
    plain = dequantize_tensors(tensors)[f"{stem}weight"]
    return plain if stored is None else stored.float() * one * tensors[f"{stem}weight_scale"]
