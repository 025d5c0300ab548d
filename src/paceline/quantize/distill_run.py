"""The training of `paceline.quantize.distill`: two copies of the target, one of them on a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RecipeError
from paceline.quantize.calibration import CalibrationRow
from paceline.quantize.distill import Distillation
from paceline.quantize.grid import QuantizedWeight
from paceline.quantize.grid_layer import GridLayer
from paceline.quantize.target_layer import Quantized
from paceline.quantize.target_plan import HEAD, TargetPlan, layer_of
from paceline.quantize.target_run import folder_prefix, load_target

__all__ = ["DistillationRun", "build_student", "run_distillation"]

_WARM_UP = 0.1  # of the steps
_FOUR_BITS, _INPUTS = 4, 64  # what the learning rate is for


@dataclass(frozen=True, kw_only=True)
class DistillationRun:
    """weights: module -> what it was trained to. before, after: (sum of divergences in nats, number
    of tokens) of each held-out row. losses: mean divergence of each step's rows."""

    weights: Mapping[str, QuantizedWeight]
    before: Sequence[tuple[float, int]]
    after: Sequence[tuple[float, int]]
    losses: Sequence[float]


def run_distillation(
    plan: TargetPlan,
    start: Quantized,
    how: Distillation,
    *,
    where: str,
    device: str,
    on_step: Callable[[int, int], None],
) -> DistillationRun:
    """Arithmetic in float32 on a CPU, in bfloat16 elsewhere; divergences always in float32.

    Raises RecipeError where the loss is no number.
    """
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    teacher = load_target(plan, kind, device)
    student = load_target(plan, kind, device)
    layers = build_student(student, plan, start)
    before = _measure(student, teacher, how)
    losses = _train(student, teacher, layers, how, where, on_step)
    return DistillationRun(
        weights={name: layer.read() for name, layer in layers.items()},
        before=before,
        after=_measure(student, teacher, how),
        losses=losses,
    )


def build_student(model: Any, plan: TargetPlan, start: Quantized) -> dict[str, GridLayer]:
    """Puts a quantised target's weights into `model`; module's name in the folder -> its layer."""
    device = next(model.parameters()).device

    def put(name: str, bias: Tensor | None) -> GridLayer:
        weight = start.weights[name]
        codes_RC, scale_RG = weight.codes_RC.to(device), weight.scale_RG.to(device)
        return GridLayer(replace(weight, codes_RC=codes_RC, scale_RG=scale_RG), bias)

    found: dict[str, GridLayer] = {}
    for number, layer in enumerate(model.model.layers):
        prefix = folder_prefix(plan, number)
        own = dict(layer.named_parameters())
        for name, tensor in start.changed.items():
            if layer_of(name) == number:
                with torch.no_grad():
                    own[name.removeprefix(prefix)].copy_(tensor)
        for name in plan.layer_modules(number):
            parent, _, leaf = name.removeprefix(prefix).rpartition(".")
            owner = layer.get_submodule(parent)
            found[name] = put(name, getattr(owner, leaf).bias)
            setattr(owner, leaf, found[name])
    if HEAD in plan.schemes:
        model.lm_head = found[HEAD] = put(HEAD, None)
    return found


def _train(
    student: Any,
    teacher: Any,
    layers: Mapping[str, GridLayer],
    how: Distillation,
    where: str,
    on_step: Callable[[int, int], None],
) -> list[float]:
    """The mean loss of each step."""
    optimizer = torch.optim.Adam(
        [
            {"params": [layer.latent_RC], "lr": how.learning_rate * _scale_rate(layer)}
            for layer in layers.values()
        ]
    )
    warm_up = max(1, round(_WARM_UP * how.num_steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, (how.num_steps - step) / how.num_steps),
    )
    batches = _draw(how)
    losses: list[float] = []
    for step in range(1, how.num_steps + 1):
        batch = next(batches)
        loss = _diverge(student, teacher, batch)[1].mean()
        losses.append(float(loss.detach()))
        if not bool(loss.detach().isfinite()):
            raise RecipeError(
                f"the loss of step {step} is not a number",
                where=f"{where}: rows {', '.join(row.row_id for row in batch)}",
                fix="Leave those rows out, or check the target's weights.",
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        for layer in layers.values():
            layer.stay_inside()
        on_step(step, how.num_steps)
    return losses


def _scale_rate(layer: GridLayer) -> float:
    """For the steps of the layer's own grid and for its inputs: Adam moves all their codes, so the
    output moves the more, the more there are."""
    finer = 2.0 ** (layer.scheme.num_bits - _FOUR_BITS)
    return float(finer * _INPUTS / layer.latent_RC.shape[1])


def _draw(how: Distillation) -> Iterator[list[CalibrationRow]]:
    """Batches without end; every row once before any comes again."""
    generator = torch.Generator().manual_seed(how.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < how.batch_size:
            waiting += torch.randperm(len(how.rows), generator=generator).tolist()
        yield [how.rows[number] for number in waiting[: how.batch_size]]
        del waiting[: how.batch_size]


def _measure(student: Any, teacher: Any, how: Distillation) -> list[tuple[float, int]]:
    found = []
    with torch.no_grad():
        for begin in range(0, len(how.held_out), how.batch_size):
            batch = how.held_out[begin : begin + how.batch_size]
            owners, values = _diverge(student, teacher, batch)
            for number in range(len(batch)):
                own = values[owners == number]
                found.append((float(own.sum(dtype=torch.float64)), len(own)))
    return found


def _diverge(student: Any, teacher: Any, batch: Sequence[CalibrationRow]) -> tuple[Tensor, Tensor]:
    """(row of the batch, KL divergence in nats) at every answer token; rows padded at their end,
    where no token that counts looks."""
    device = next(teacher.parameters()).device
    tokens = torch.zeros(len(batch), max(len(row.input_ids) for row in batch), dtype=torch.int64)
    places: list[tuple[int, int]] = []
    for number, row in enumerate(batch):
        tokens[number, : len(row.input_ids)] = torch.tensor(list(row.input_ids))
        for begin, end in row.loss_spans:
            places += [(number, at - 1) for at in range(max(1, begin), end)]
    owners, at = torch.tensor(places, device=device).unbind(1)
    tokens = tokens.to(device)
    with torch.no_grad():
        wanted = _read_logprobs(teacher, tokens, owners, at)
    given = _read_logprobs(student, tokens, owners, at)
    return owners, (wanted.exp() * (wanted - given)).sum(-1)


def _read_logprobs(model: Any, tokens: Tensor, owners: Tensor, at: Tensor) -> Tensor:
    states = model.model(input_ids=tokens, use_cache=False).last_hidden_state[owners, at]
    logits: Tensor = model.get_output_embeddings()(states).to(torch.float32)
    return logits.log_softmax(-1)
