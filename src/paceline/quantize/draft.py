"""A draft folder in, the same draft with quantised matrices out.

Layers are done in the order in which they run, each calibrated on what it reads once everything
before it is quantised already: an error that was made earlier is part of the inputs that the next
layer is fitted to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.draft import (
    QUANTIZABLE,
    Draft,
    Scheme,
    build_contract,
    drafts_in_parallel,
    read_scheme,
    read_tensors,
    write_draft,
)
from paceline.errors import DraftError, PlanError
from paceline.quantize.calibration import Calibration, Moments
from paceline.quantize.schemes import (
    build_group,
    build_settings,
    describe_scheme,
    draft_targets,
    require_group,
)
from paceline.records import build_provenance

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["METHODS", "DraftPlan", "plan_draft", "quantize_draft"]

METHODS = ("gptq", "rtn")
_HEAD = "lm_head"
_WHY_NOT = {
    "mtp": "vLLM 0.31.0 gives an MTP head the target's quantisation: one of its own cannot be"
    " expressed",
    "medusa": "vLLM 0.31.0 builds a Medusa draft of plain layers: there is no place for packed"
    " weights",
}
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# modules of one layer in the order in which they run; those of one group read the same inputs
_STAGES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """What will be done. modules: matrices to quantise, in stages that share their inputs.

    kept: matrices that stay as they are. method: "gptq" or "rtn" (nearest grid point).
    """

    draft: Draft
    scheme: Scheme
    method: str
    stages: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...] = field(default=())

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(module for stage in self.stages for module in stage)


def plan_draft(
    draft: Draft, scheme: Scheme, *, method: str = "gptq", keep: Sequence[str] = ()
) -> DraftPlan:
    """Which matrices get which scheme. keep: last parts of module names, such as "fc".

    Raises DraftError for a draft that cannot be quantised, with vLLM's reason; PlanError for
    settings that contradict each other or have no effect.
    """
    if method not in METHODS:
        raise PlanError(f"method '{method}' is unknown", where="--method", expected="gptq or rtn")
    if draft.family not in QUANTIZABLE:
        raise DraftError(
            _WHY_NOT.get(draft.family, f"a draft of family {draft.family} has no weights"),
            where=str(draft.path),
            expected=f"a draft of family {', '.join(QUANTIZABLE)}",
            fix="Quantise the target; its MTP head is carried over as it is."
            if draft.family == "mtp"
            else "Serve it as it is.",
        )
    if read_scheme(draft.family, draft.config) is not None:
        raise DraftError(
            "this draft is quantised already",
            where=f"{draft.path}/config.json: quantization_config",
            fix="Start from the 16-bit draft that it was made from.",
        )
    contract = build_contract(draft.family, draft.config)
    shapes = {
        name.removesuffix(".weight"): rule.shape
        for name, rule in contract.tensors.items()
        if name in draft.tensors
        and (rule.is_linear or (scheme.has_head and name == f"{_HEAD}.weight"))
    }
    if scheme.has_head and _HEAD not in shapes:
        raise PlanError(
            "the draft has no output layer of its own to quantise: it shares the target's",
            where="--head",
            fix="Leave --head out, or cut the vocabulary too (--vocab).",
        )
    kept = _find_kept(shapes, keep)
    if draft.family == "eagle3" and drafts_in_parallel(draft.config):
        kept.add("fc")  # vLLM 0.31.0 gives it the masked state as one row; its kernels want a batch
    chosen = {name: shape for name, shape in shapes.items() if name not in kept}
    if not chosen:
        raise PlanError("nothing is left to quantise", where="--keep")
    require_group(scheme, chosen)
    return DraftPlan(
        draft=draft, scheme=scheme, method=method, stages=_order(chosen), kept=tuple(sorted(kept))
    )


def _find_kept(shapes: Mapping[str, Any], keep: Sequence[str]) -> set[str]:
    kept: set[str] = set()
    for word in keep:
        found = {name for name in shapes if name.rpartition(".")[2] == word}
        if not found:
            raise PlanError(
                f"'{word}' names no matrix of this draft",
                where="--keep",
                expected=", ".join(sorted({name.rpartition(".")[2] for name in shapes})),
            )
        kept |= found
    for members in _FUSED:
        named = [word for word in members if word in keep]
        if named and len(named) < len(members):
            raise PlanError(
                f"{', '.join(named)} without the rest of {', '.join(members)}",
                where="--keep",
                expected="all of them: vLLM fuses them into one matrix, which has one scheme",
            )
    return kept


def _order(modules: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Stages in the order in which they run: what comes before the layers, the layers, the head."""
    places: dict[tuple[int, int], list[str]] = {}
    for name in modules:
        leaf = name.rpartition(".")[2]
        stage = next((number for number, part in enumerate(_STAGES) if leaf in part), None)
        found = re.search(r"layers\.(\d+)\.", name)
        if stage is not None:
            place = (1 + (int(found[1]) if found else 0), stage)
        else:
            place = (10**6 if leaf == _HEAD else 0, 0)
        places.setdefault(place, []).append(name)
    return tuple(tuple(sorted(places[place])) for place in sorted(places))


def quantize_draft(
    plan: DraftPlan,
    out_dir: str | Path,
    *,
    calibration: Calibration | None = None,
    calibrated_on: Mapping[str, Any] | None = None,
    where: str = "",
    replace: bool = False,
    on_stage: Callable[[int, int, str], None] | None = None,
) -> Draft:
    """Writes the quantised draft. calibration: for gptq, and for the errors that are recorded.

    calibrated_on: what the rows were, for the record; where: their file, for messages.
    Raises PlanError for gptq without calibration; what Moments and write_draft raise.
    """
    import torch

    from paceline.quantize.grid import build_tensors

    if plan.method == "gptq" and calibration is None:
        raise PlanError(
            "GPTQ needs the draft's own inputs",
            where="--data",
            expected="a data folder of this target (`paceline data answer`)",
            fix="Give --data, or take --method rtn, which rounds each weight on its own.",
        )
    tensors = read_tensors(plan.draft)
    _require_finite(tensors, plan.draft)
    stored = dict(tensors)
    record: dict[str, Any] = {}
    for number, stage in enumerate(plan.stages, 1):
        if on_stage is not None:
            on_stage(number, len(plan.stages), stage[0].rpartition(".")[2])
        moments = None
        if calibration is not None:
            moments = Moments(stage, where=where)
            weights = {n: t for n, t in tensors.items() if n != "t2d"}
            calibration.observe(moments.seen, weights)
        for module in stage:
            quantized, told = _quantize_one(module, tensors[f"{module}.weight"], plan, moments)
            record[module] = told
            name = f"{module}.weight"
            tensors[name] = quantized.plain_RC.to(tensors[name].dtype)
            del stored[name]
            stored.update(build_tensors(module, quantized))
    assert all(isinstance(tensor, torch.Tensor) for tensor in stored.values())
    config = {
        **plan.draft.config,
        "quantization_config": build_settings(
            [build_group(plan.scheme, draft_targets(plan.scheme))], _ignored(plan)
        ),
    }
    spec = {
        k: v for k, v in plan.draft.spec.items() if k not in ("family", "num_speculative_tokens")
    }
    return write_draft(
        out_dir,
        family=plan.draft.family,
        config=config,
        tensors=stored,
        num_speculative_tokens=plan.draft.num_speculative_tokens,
        metadata=_build_metadata(plan, record, calibrated_on),
        spec=spec,
        replace=replace,
    )


def _quantize_one(module: str, weight: Tensor, plan: DraftPlan, moments: Moments | None) -> Any:
    import torch

    from paceline.quantize.gptq import gptq
    from paceline.quantize.grid import output_error, round_to_nearest

    scheme = plan.scheme
    dtype = weight.dtype if scheme.is_packed else torch.float32
    wide = weight.to(torch.float32)
    hessian = None if moments is None else moments.hessian(module)
    if plan.method == "gptq":
        assert hessian is not None
        quantized = gptq(wide, hessian, scheme, dtype=dtype)
    else:
        quantized = round_to_nearest(wide, scheme, dtype=dtype)
    told = {
        "output_error": None
        if hessian is None
        else output_error(wide, quantized.plain_RC, hessian),
        "num_inputs": 0 if moments is None else moments.num_inputs(module),
    }
    return quantized, told


def _require_finite(tensors: Mapping[str, Tensor], draft: Draft) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DraftError(
                f"tensor '{name}' holds NaN or infinity",
                where=f"{draft.path}/{draft.tensor_files[name]}",
                expected="finite weights",
                fix="Train the draft again; no quantisation makes it good.",
            )


def _ignored(plan: DraftPlan) -> list[str]:
    """Kept matrices as vLLM's own names end: its prefixes count the target's layers in."""
    leaves = sorted({name.rpartition(".")[2] for name in plan.kept})
    return [f"re:.*{leaf}$" for leaf in leaves]


def _build_metadata(
    plan: DraftPlan, record: Mapping[str, Any], calibrated_on: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        **plan.draft.metadata,
        "quantized": {
            "from_sha256": plan.draft.sha256,
            "scheme": describe_scheme(plan.scheme),
            "method": plan.method,
            "head": plan.scheme.has_head,
            "kept": list(plan.kept),
            "calibrated_on": None if calibrated_on is None else dict(calibrated_on),
            "modules": dict(record),
            "bytes_before": plan.draft.files_bytes,
            "provenance": build_provenance(),
        },
    }
