"""The target through transformers, one decoder layer after the other, over the calibration rows.

Every layer is calibrated on what the layers before it put out once they are quantised. Only one
layer's second moments are held at a time, and one hidden state a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import DataError, TargetError
from paceline.quantize.awq import choose_smoothing, rescale_hessian
from paceline.quantize.calibration import CalibrationRow, Moments
from paceline.quantize.gptq import gptq
from paceline.quantize.grid import QuantizedWeight, output_error, round_to_nearest
from paceline.quantize.target_plan import HEAD, TargetPlan

__all__ = ["Quantized", "run_target"]

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


def run_target(
    plan: TargetPlan,
    rows: Sequence[CalibrationRow],
    *,
    where: str,
    device: str = "cpu",
    dtype: str = "bfloat16",
    on_layer: Callable[[int, int], None] | None = None,
) -> Quantized:
    """Quantises every module of the plan. where: the rows' file, for messages.

    Raises TargetError for a target that transformers cannot load, DataError naming a row whose
    states are not finite.
    """
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = _load(plan, kind, device)
    weights: dict[str, QuantizedWeight] = {}
    changed: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    with torch.no_grad():
        states, arguments = _enter(model, rows, where, device)
        layers = model.model.layers
        for number, layer in enumerate(layers):
            prefix = _folder_prefix(plan, number)
            modules = plan.layer_modules(number)
            if modules:
                first = [names[0].removeprefix(prefix) for names in _group(modules)]
                moments = Moments(first, where=where)
                _watch(layer, moments, rows, states, arguments, number)
                done = _quantize_layer(layer, prefix, modules, moments, plan, kind)
                weights.update(done.weights)
                changed.update(done.changed)
                errors.update(done.errors)
            for at, row in enumerate(rows):
                states[at] = _forward(layer, states[at], arguments[at][number])
                _require_finite(states[at], row, f"layer {number}", where)
            if on_layer is not None:
                on_layer(number + 1, len(layers))
        if plan.head is not None:
            moments = Moments([HEAD], where=where)
            for at, row in enumerate(rows):
                moments.seen(row.row_id, HEAD, model.model.norm(states[at]).flatten(0, -2))
            matrix = model.get_output_embeddings().weight.detach().float()
            weights[HEAD] = _round(matrix, moments.hessian(HEAD), plan, HEAD, kind)
            errors[HEAD] = output_error(matrix, weights[HEAD].plain_RC, moments.hessian(HEAD))
    return Quantized(weights=weights, changed=changed, errors=errors)


def _load(plan: TargetPlan, kind: torch.dtype, device: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(plan.target.path), dtype=kind, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as problem:
        reason = str(problem).split("\n")[0]
        raise TargetError(
            f"transformers cannot load the target: {reason}", where=str(plan.target.path)
        ) from problem
    return model.to(device).eval().requires_grad_(False)


def _folder_prefix(plan: TargetPlan, layer: int) -> str:
    ending = f".layers.{layer}.mlp.down_proj.weight"
    name = next(n for n in plan.tensors if n.endswith(ending) and not n.startswith("mtp."))
    return name.removesuffix("mlp.down_proj.weight")


def _enter(
    model: Any, rows: Sequence[CalibrationRow], where: str, device: str
) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
    """Each row's embeddings, and what its layers are called with beside the states."""
    states: list[Tensor] = []
    arguments: list[list[dict[str, Any]]] = []
    for row in rows:
        calls: list[dict[str, Any]] = []
        first: list[Tensor] = []

        def keep(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            calls: list[dict[str, Any]] = calls,
            first: list[Tensor] = first,
        ) -> None:
            states_BTD = args[0] if args else kwargs["hidden_states"]
            if not first:
                first.append(states_BTD)
            calls.append({k: v for k, v in kwargs.items() if k != "hidden_states"})

        hooks = [
            layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers
        ]
        try:
            tokens = torch.tensor([list(row.input_ids)], device=device)
            output = model.model(input_ids=tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        _require_finite(output.last_hidden_state, row, "the last layer", where)
        states.append(first[0])
        arguments.append(calls)
    return states, arguments


def _require_finite(states: Tensor, row: CalibrationRow, place: str, where: str) -> None:
    if not bool(states.isfinite().all()):
        raise DataError(
            f"row '{row.row_id}': the target's states after {place} are not all finite numbers",
            where=where,
            expected="numbers",
            fix="Leave the row out, or check the target's weights (`paceline target show`).",
        )


def _forward(layer: nn.Module, states: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    output = layer(states, **kwargs)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _watch(
    layer: nn.Module,
    moments: Moments,
    rows: Sequence[CalibrationRow],
    states: Sequence[Tensor],
    arguments: Sequence[Sequence[Mapping[str, Any]]],
    number: int,
) -> None:
    current = ""

    def before(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            moments.seen(current, name, inputs[0].flatten(0, -2))

        return see

    hooks = [
        part.register_forward_pre_hook(before(name))
        for name, part in layer.named_modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        for at, row in enumerate(rows):
            current = row.row_id
            _forward(layer, states[at], arguments[at][number])
    finally:
        for hook in hooks:
            hook.remove()


def _group(modules: Sequence[str]) -> list[list[str]]:
    """Modules that read the same inputs, together: rows do not know of one another."""
    groups: dict[tuple[str, ...] | str, list[str]] = {}
    for name in modules:
        leaf = name.rpartition(".")[2]
        shared = next((leaves for leaves in _SAME_INPUTS if leaf in leaves), leaf)
        groups.setdefault(shared, []).append(name)
    return list(groups.values())


def _quantize_layer(
    layer: nn.Module,
    prefix: str,
    modules: Sequence[str],
    moments: Moments,
    plan: TargetPlan,
    kind: torch.dtype,
) -> Quantized:
    parts = dict(layer.named_modules())
    groups = _group(modules)
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
        whole = _round(torch.cat(wides), hessian, plan, names[0], kind)
        sizes = [len(wide) for wide in wides]
        codes, scales = whole.codes_RC.split(sizes), whole.scale_RG.split(sizes)
        for name, wide, code_RC, scale_RG in zip(names, wides, codes, scales, strict=True):
            weights[name] = QuantizedWeight(
                scheme=whole.scheme, codes_RC=code_RC, scale_RG=scale_RG
            )
            errors[name] = output_error(wide, weights[name].plain_RC, hessian)
            part: Any = parts[name.removeprefix(prefix)]
            part.weight.copy_(weights[name].plain_RC)
    # biases are stored as they are; a rescaled matrix has a rescaled row, not a rescaled bias
    return Quantized(weights=weights, changed=changed, errors=errors)


def _round(
    wide: Tensor, hessian: Tensor, plan: TargetPlan, name: str, kind: torch.dtype
) -> QuantizedWeight:
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
