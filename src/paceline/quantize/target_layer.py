"""One decoder layer: what AWQ rescales in it, and its matrices rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.quantize.awq import choose_smoothing, rescale_hessian
from paceline.quantize.calibration import Moments
from paceline.quantize.gptq import gptq
from paceline.quantize.grid import QuantizedWeight, output_error, round_to_nearest
from paceline.quantize.target_plan import TargetPlan

__all__ = ["Quantized", "group_modules", "quantize_layer", "round_matrix"]

# norms of these model types scale by 1 + weight
_CENTRED_NORMS = ("qwen3_5", "qwen3_next")
_AFTER_NORM = {
    "input_layernorm": (
        "q_proj",
        "k_proj",
        "v_proj",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
    ),
    "post_attention_layernorm": ("gate_proj", "up_proj"),
}
_SAME_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("gate_proj", "up_proj"),
)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What a run gives to one layer's module or the head at a time.

    weights: module -> its codes and scales. changed: other tensors that AWQ rescaled, by their name
    in the folder. errors: module -> relative output error on the calibration inputs.
    """

    weights: Mapping[str, QuantizedWeight]
    changed: Mapping[str, Tensor]
    errors: Mapping[str, float]


def group_modules(modules: Sequence[str]) -> list[list[str]]:
    """Modules that read the same inputs, together: rows do not know of one another."""
    groups: dict[tuple[str, ...] | str, list[str]] = {}
    for name in modules:
        leaf = name.rpartition(".")[2]
        shared = next((leaves for leaves in _SAME_INPUTS if leaf in leaves), leaf)
        groups.setdefault(shared, []).append(name)
    return list(groups.values())


def quantize_layer(
    layer: nn.Module,
    prefix: str,
    modules: Sequence[str],
    moments: Moments,
    plan: TargetPlan,
    kind: torch.dtype,
) -> Quantized:
    """Rounds the layer's `modules` (names in the folder) and leaves the result in the layer.

    prefix: the layer's own, with its dot. moments: of the first module of each group. kind: the
    dtype that the model runs in.
    """
    parts = dict(layer.named_modules())
    groups = group_modules(modules)
    hessians = {
        name: moments.hessian(names[0].removeprefix(prefix)) for names in groups for name in names
    }
    changed: dict[str, Tensor] = {}
    if plan.method == "awq":
        changed = _smooth(layer, prefix, modules, hessians, plan, kind)
    weights, errors = {}, {}
    for names in groups:
        wides = [parts[n.removeprefix(prefix)].weight.detach().float() for n in names]
        hessian = hessians[names[0]]
        whole = round_matrix(torch.cat(wides), hessian, plan, names[0])
        sizes = [len(wide) for wide in wides]
        for name, wide, own in zip(names, wides, _split(whole, sizes), strict=True):
            weights[name] = own
            errors[name] = output_error(wide, own.plain_RC, hessian)
            part: Any = parts[name.removeprefix(prefix)]
            part.weight.copy_(own.plain_RC)
    return Quantized(weights=weights, changed=changed, errors=errors)


def _split(whole: QuantizedWeight, num_rows: list[int]) -> list[QuantizedWeight]:
    """Matrices that were rounded as one, apart again."""
    codes, scales = torch.split(whole.codes_RC, num_rows), torch.split(whole.scale_RG, num_rows)
    offsets: Sequence[Tensor | None] = [None] * len(num_rows)
    if whole.offset_RC is not None:
        offsets = torch.split(whole.offset_RC, num_rows)
    return [
        QuantizedWeight(scheme=whole.scheme, codes_RC=code, scale_RG=scale, offset_RC=offset)
        for code, scale, offset in zip(codes, scales, offsets, strict=True)
    ]


def round_matrix(wide: Tensor, hessian: Tensor, plan: TargetPlan, name: str) -> QuantizedWeight:
    """One float32 matrix under the scheme of module `name`, by the plan's method."""
    scheme = plan.schemes[name]
    dtype = torch.bfloat16 if scheme.is_packed else torch.float32
    if plan.method == "gptq":
        return gptq(wide, hessian, scheme, dtype=dtype)
    importance = hessian.diagonal().float() if plan.method == "awq" else None
    return round_to_nearest(wide, scheme, dtype=dtype, importance_C=importance)


def _smooth(
    layer: nn.Module,
    prefix: str,
    modules: Sequence[str],
    hessians: dict[str, Tensor],
    plan: TargetPlan,
    kind: torch.dtype,
) -> dict[str, Tensor]:
    """Rescales what AWQ finds, in the module itself; tensors that changed and are not quantised.

    The rows of up_proj take back down_proj's scale, norms that of what reads them. The output
    projections keep theirs: grouped heads and a gated norm leave nothing to fold it into.
    """
    parts: dict[str, Any] = dict(layer.named_modules())
    changed: dict[str, Tensor] = {}
    down, up = f"{prefix}mlp.down_proj", f"{prefix}mlp.up_proj"
    if down in modules and up in modules:
        scale = _search([down], parts, prefix, hessians, plan)
        up_part = parts["mlp.up_proj"]
        up_part.weight.copy_((up_part.weight.float() / scale[:, None]).to(kind))
        if up_part.bias is not None:
            up_part.bias.copy_((up_part.bias.float() / scale).to(kind))
            changed[f"{up}.bias"] = up_part.bias.detach().clone()
    for norm, leaves in _AFTER_NORM.items():
        readers = [name for name in parts if name.rpartition(".")[2] in leaves]
        chosen = [f"{prefix}{name}" for name in readers if f"{prefix}{name}" in modules]
        if not chosen or f"{norm}" not in parts:
            continue
        scale = _search(chosen, parts, prefix, hessians, plan)
        for name in readers:
            if f"{prefix}{name}" not in modules:
                part = parts[name]
                part.weight.copy_((part.weight.float() * scale).to(kind))
                changed[f"{prefix}{name}.weight"] = part.weight.detach().clone()
        weight = parts[norm].weight
        offset = 1.0 if plan.target.model_type.startswith(_CENTRED_NORMS) else 0.0
        weight.copy_(((weight.float() + offset) / scale - offset).to(kind))
        changed[f"{prefix}{norm}.weight"] = weight.detach().clone()
    return changed


def _search(
    names: Sequence[str],
    parts: Mapping[str, Any],
    prefix: str,
    hessians: dict[str, Tensor],
    plan: TargetPlan,
) -> Tensor:
    """The scale for these modules, applied to their weights and second moments; float32 [C]."""
    weights = {n: parts[n.removeprefix(prefix)].weight.detach().float() for n in names}
    scale, _, _ = choose_smoothing(weights, plan.schemes, hessians[names[0]], dtype=torch.bfloat16)
    narrow = scale.float()
    for name in names:
        part = parts[name.removeprefix(prefix)]
        part.weight.copy_((weights[name] * narrow).to(part.weight.dtype))
        hessians[name] = rescale_hessian(hessians[name], scale)
    return narrow
