"""The target through transformers, one decoder layer after the other, over the calibration rows.

Every layer is calibrated on what the layers before it put out once they are quantised. Only one
layer's second moments are held at a time, and one hidden state a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import DataError, TargetError
from paceline.quantize.calibration import CalibrationRow, Moments
from paceline.quantize.grid import QuantizedWeight, output_error
from paceline.quantize.target_layer import (
    Quantized,
    group_modules,
    quantize_layer,
    round_matrix,
)
from paceline.quantize.target_plan import HEAD, TargetPlan

__all__ = ["folder_prefix", "load_target", "run_target"]


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
    model = load_target(plan, kind, device)
    weights: dict[str, QuantizedWeight] = {}
    changed: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    with torch.no_grad():
        states, arguments = _enter(model, rows, where, device)
        layers = model.model.layers
        for number, layer in enumerate(layers):
            prefix = folder_prefix(plan, number)
            modules = plan.layer_modules(number)
            if modules:
                first = [names[0].removeprefix(prefix) for names in group_modules(modules)]
                moments = Moments(first, where=where)
                _watch(layer, moments, rows, states, arguments, number)
                done = quantize_layer(layer, prefix, modules, moments, plan, kind)
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
            weights[HEAD] = round_matrix(matrix, moments.hessian(HEAD), plan, HEAD)
            errors[HEAD] = output_error(matrix, weights[HEAD].plain_RC, moments.hessian(HEAD))
    return Quantized(weights=weights, changed=changed, errors=errors)


def load_target(plan: TargetPlan, kind: torch.dtype, device: str) -> Any:
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


def folder_prefix(plan: TargetPlan, layer: int) -> str:
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
