"""Which matrix of a target gets which scheme: from its tensors' names and its stated layer types.

Never quantised: embeddings, norms, a recurrent layer's gates (in_proj_a, in_proj_b), convolution
and state parameters, an MTP head, a vision tower. Matrices that vLLM 0.31.0 fuses share a scheme.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.draft import HEAD_TARGET, Scheme
from paceline.errors import PlanError, TargetError
from paceline.quantize.schemes import build_group, build_settings, require_group
from paceline.safetensors_header import TensorInfo
from paceline.target import TargetFacts, read_weight_headers

__all__ = ["TARGET_METHODS", "TargetPlan", "build_target_settings", "plan_target"]

TARGET_METHODS = ("gptq", "awq", "rtn")
HEAD = "lm_head"
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_RECURRENT = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj")
_GATES = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_LAYER = re.compile(r"^(?:model|model\.language_model|language_model\.model)\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """What will be done.

    schemes: module -> scheme, in the order in which they run, "lm_head" last. body, recurrent,
    head: what the config's groups say; None where nothing of the kind is quantised. kept: linear
    layers of the decoder that stay as they are. tensors: every tensor of the folder by name, and
    files: the file that holds each.
    """

    target: TargetFacts
    method: str
    body: Scheme
    recurrent: Scheme | None
    head: Scheme | None
    schemes: Mapping[str, Scheme]
    kept: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, str]

    def layer_modules(self, layer: int) -> tuple[str, ...]:
        """Modules of one layer that get a scheme."""
        return tuple(name for name in self.schemes if layer_of(name) == layer)


def layer_of(name: str) -> int | None:
    """The decoder layer that a module or tensor belongs to; None outside, an MTP head included."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def plan_target(
    target: TargetFacts,
    body: Scheme,
    *,
    method: str = "gptq",
    recurrent: Scheme | None = None,
    head: Scheme | None = None,
    num_edge_layers: int = 1,
) -> TargetPlan:
    """Fixes every module's scheme. recurrent: for Gated-DeltaNet layers; None keeps them.

    head: an output layer of its own under this scheme, untied where it was tied; None keeps it.
    num_edge_layers: first and last decoder layers that stay as they are.
    Raises PlanError for settings without effect or that do not fit, TargetError for a target whose
    layers are not the known ones, or that is quantised already.
    """
    if method not in TARGET_METHODS:
        raise PlanError(
            f"method '{method}' is unknown", where="--method", expected=" or ".join(TARGET_METHODS)
        )
    if recurrent is not None and not target.is_hybrid:
        raise PlanError(
            "the target has no recurrent layers", where="--recurrent", fix="Leave it out."
        )
    headers = read_weight_headers(target.path, require_weights=True)
    tensors = {n: t for header in headers.values() for n, t in header.tensors.items()}
    files = {name: file for file, header in headers.items() for name in header.tensors}
    _require_plain(target, tensors)
    count = target.num_hidden_layers
    if not 0 <= 2 * num_edge_layers < count:
        raise PlanError(
            f"{num_edge_layers} layers kept at each end of {count}",
            where="--edges",
            expected=f"0 to {(count - 1) // 2}",
        )
    edges = {*range(num_edge_layers), *range(count - num_edge_layers, count)}
    schemes: dict[str, Scheme] = {}
    kept: list[str] = []
    for layer in range(count):
        prefix = _prefix(tensors, layer, target)
        is_recurrent = "linear" in target.layer_types[layer]
        mixer = _RECURRENT if is_recurrent else _ATTENTION
        for leaf in (*mixer, *_MLP):
            name = f"{prefix}.{leaf}"
            if f"{name}.weight" not in tensors:
                raise TargetError(
                    f"layer {layer} ({target.layer_types[layer]}) has no '{leaf}.weight'",
                    where=str(target.path),
                    expected="a dense decoder of the Llama or Qwen3.5 kind",
                )
            scheme = recurrent if leaf in _RECURRENT else body
            if layer in edges or scheme is None:
                kept.append(name)
            else:
                schemes[name] = scheme
        if is_recurrent:
            kept += [f"{prefix}.{leaf}" for leaf in _GATES if f"{prefix}.{leaf}.weight" in tensors]
    if head is not None:
        schemes[HEAD] = head
    for scheme in dict.fromkeys(schemes.values()):
        shapes = {n: _shape(n, tensors, target) for n, s in schemes.items() if s == scheme}
        require_group(scheme, shapes)
    return TargetPlan(
        target=target,
        method=method,
        body=body,
        recurrent=recurrent,
        head=head,
        schemes=schemes,
        kept=tuple(kept),
        tensors=tensors,
        files=files,
    )


def _require_plain(target: TargetFacts, tensors: Mapping[str, TensorInfo]) -> None:
    nested = target.config.get("text_config")
    settings = {**(nested if isinstance(nested, dict) else {}), **target.config}
    if settings.get("quantization_config") is not None or any(
        name.endswith((".weight_packed", ".weight_scale", ".qweight")) for name in tensors
    ):
        raise TargetError(
            "this target is quantised already",
            where=str(target.path),
            fix="Start from the 16-bit target that it was made from.",
        )
    if any(".experts." in name for name in tensors):
        raise TargetError(
            "this target has a mixture of experts",
            where=str(target.path),
            expected="a dense decoder: experts need calibration of their own",
            fix="Quantise it with llm-compressor in an environment of its own.",
        )


def _prefix(tensors: Mapping[str, TensorInfo], layer: int, target: TargetFacts) -> str:
    for stem in ("model", "model.language_model", "language_model.model"):
        if f"{stem}.layers.{layer}.mlp.down_proj.weight" in tensors:
            return f"{stem}.layers.{layer}"
    raise TargetError(
        f"there is no layer {layer} under a known name",
        where=str(target.path),
        expected=f"model.layers.{layer}.mlp.down_proj.weight",
    )


def _shape(name: str, tensors: Mapping[str, TensorInfo], target: TargetFacts) -> tuple[int, ...]:
    info = tensors.get(f"{name}.weight")
    return (target.vocab_size, target.hidden_size) if info is None else info.shape


def build_target_settings(plan: TargetPlan) -> dict[str, Any]:
    """The quantization_config: a group a scheme, by module kinds; what is kept, by name."""
    kinds: dict[Scheme, list[str]] = {}
    chosen = {name.split(".layers.")[-1].partition(".")[2] for name in plan.schemes}
    for leaves, scheme in (
        (_ATTENTION, plan.body),
        (_MLP, plan.body),
        (_RECURRENT, plan.recurrent),
    ):
        if scheme is not None:
            found = [
                f"re:.*{leaf.replace('.', chr(92) + '.')}$" for leaf in leaves if leaf in chosen
            ]
            kinds.setdefault(scheme, []).extend(found)
    if plan.head is not None:
        kinds.setdefault(plan.head, []).append(HEAD_TARGET)
    groups = [build_group(scheme, targets) for scheme, targets in kinds.items() if targets]
    ignore = list(plan.kept)
    if any(name.startswith("mtp.") for name in plan.tensors):
        ignore.append("re:^mtp.*")
    if any(".visual." in name or name.startswith("visual.") for name in plan.tensors):
        ignore.append("re:.*visual.*")
    if plan.head is None:
        ignore.append(HEAD)
    return build_settings(groups, ignore)
