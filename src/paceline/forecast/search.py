"""Thousands of designs under one contest: the best, and the frontier of memory against time."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError, PlanError
from paceline.forecast.assume import expected_length
from paceline.forecast.cache import CacheUse, measure_cache
from paceline.forecast.design import Design, build_design, native_baseline
from paceline.forecast.memory import all_layers
from paceline.forecast.score import StepTime
from paceline.forecast.shape import CachePlan, TargetShape
from paceline.forecast.sizes import DraftSizes, draft_layers, measure_design
from paceline.forecast.space import Space
from paceline.forecast.step_model import StepModel
from paceline.forecast.work import StepWork, measure_work
from paceline.rules import Rules, compute_score

__all__ = ["Candidate", "Search", "search_designs"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One design with its forecast. settings: as a DESIGN.toml would state them. broken: limits
    of the rules that it does not keep. M in bytes; times in milliseconds."""

    settings: dict[str, Any]
    num_parameters: int
    files_bytes: int
    memory_bytes: int
    acceptance_length: float
    step_ms: float
    tpot_ms: float
    score: float
    ranked: bool
    broken: tuple[str, ...]

    @property
    def allowed(self) -> bool:
        return not self.broken and self.ranked


@dataclass(frozen=True, kw_only=True)
class Search:
    """candidates: all that vLLM could run, best score first. frontier: those of the allowed that no
    other beats in both memory and time per token, least memory first. refused: why designs of the
    space cannot be, with their number. step_source: where step times come from."""

    target: str
    rules: str
    space: str
    space_sha256: str
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]
    refused: dict[str, int]
    length_tokens: int
    entry_num_speculative_tokens: int
    step_source: str
    assumed: dict[str, Any] = field(default_factory=dict)


def search_designs(
    space: Space,
    shape: TargetShape,
    rules: Rules,
    *,
    bandwidth_gb_s: float = 3500.0,
    model: StepModel | None = None,
    plan: CachePlan | None = None,
) -> Search:
    """Tries every design of the space.

    model: a fitted step-time model; None takes the roofline at bandwidth_gb_s. The baseline is the
    target's own MTP head with the rules' K and the space's assumption for mtp. Raises PlanError
    without a baseline, RecipeError for a value without a factor.
    """
    plan = plan or CachePlan()
    base = native_baseline(shape, rules.speculation.baseline_num_speculative_tokens)
    if base is None or "mtp" not in space.acceptance:
        raise PlanError(
            "there is no baseline to score against",
            where=shape.facts.name if base is None else space.name,
            expected="a target with an MTP head, and a table [acceptance.mtp] in the space",
        )
    desk = _Desk(space, shape, rules, plan, bandwidth_gb_s, model)
    settings = {"family": "mtp", "num_speculative_tokens": base.num_speculative_tokens}
    desk.baseline = baseline = desk.judge(base, settings)
    found, refused = [], dict[str, int]()
    for table in space.combine(shape):
        if not table.get("window", 1):
            del table["window"]
        try:
            design = build_design(table, shape, where=space.name)
            found.append(desk.judge(design, table))
        except PlanError as problem:
            reason = f"{table['family']}: {problem.what}"
            refused[reason] = refused.get(reason, 0) + 1
    found.sort(key=lambda one: (-one.score, one.memory_bytes, one.step_ms))
    return Search(
        target=shape.facts.name,
        rules=rules.name,
        space=space.name,
        space_sha256=space.sha256,
        baseline=baseline,
        candidates=tuple(found),
        frontier=_find_frontier([one for one in found if one.allowed]),
        refused=refused,
        length_tokens=desk.tokens,
        entry_num_speculative_tokens=rules.speculation.entry_num_speculative_tokens,
        step_source=desk.step_source,
        assumed={name: dataclasses.asdict(one) for name, one in space.acceptance.items()},
    )


def _find_frontier(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.memory_bytes, c.tpot_ms)):
        if not kept or one.tpot_ms < kept[-1].tpot_ms:
            kept.append(one)
    return tuple(kept)


class _Desk:
    """One search's constants, and what many designs share: sizes whatever K, caches by geometry."""

    def __init__(
        self,
        space: Space,
        shape: TargetShape,
        rules: Rules,
        plan: CachePlan,
        bandwidth_gb_s: float,
        model: StepModel | None,
    ) -> None:
        self.space, self.shape, self.rules, self.plan = space, shape, rules, plan
        self.bandwidth_gb_s, self.model = bandwidth_gb_s, model
        self.context = rules.context_tokens
        self.tokens = self.context // 2
        self.baseline: Candidate | None = None
        self._sizes: dict[tuple[Any, ...], DraftSizes] = {}
        self._caches: dict[tuple[Any, ...], CacheUse] = {}
        self._own: dict[str, int] = {}
        self._plain = self._use(None, 0)
        self.step_source = (
            model.describe(shape.facts.name)
            if model is not None
            else f"roofline at {bandwidth_gb_s:,.0f} GB/s: an assumption, not a measurement"
        )
        if model is not None:
            model.require_target(shape.facts.name)

    def judge(self, design: Design, settings: dict[str, Any]) -> Candidate:
        sizes = self._measure(design)
        use = self._use(design, design.num_speculative_tokens)
        memory = sizes.weights_bytes + sizes.buffers_bytes
        memory += use.total_bytes - self._plain.total_bytes
        work = measure_work(design, sizes, self.shape, tokens=self.tokens, plan=self.plan)
        step = self._step_ms(work)
        length = self._length(design, sizes, settings)
        base = self.baseline
        tau = 1.0 if base is None else length / base.acceptance_length
        memory_ratio = 1.0 if base is None else base.memory_bytes / memory if memory else math.inf
        tpot = step / length
        tpot_ratio = 1.0 if base is None else base.tpot_ms / tpot
        score = compute_score(
            self.rules, tau_ratio=tau, memory_ratio=memory_ratio, tpot_ratio=tpot_ratio
        )
        return Candidate(
            settings=settings,
            num_parameters=sizes.num_parameters,
            files_bytes=sizes.files_bytes,
            memory_bytes=memory,
            acceptance_length=length,
            step_ms=step,
            tpot_ms=tpot,
            score=score.value,
            ranked=score.ranked,
            broken=self._broken(design, sizes),
        )

    def _broken(self, design: Design, sizes: DraftSizes) -> tuple[str, ...]:
        limits = self.rules.limits
        wrong = {
            "family": design.family not in limits.families,
            "parameters": sizes.num_parameters > limits.max_parameters,
            "files_bytes": sizes.files_bytes > limits.max_files_bytes,
        }
        return tuple(name for name, is_wrong in wrong.items() if is_wrong)

    def _step_ms(self, work: StepWork) -> float:
        if self.model is not None:
            return self.model.predict(work)
        return StepTime(
            verify_bytes=work.target_bytes,
            cache_bytes=work.cache_bytes,
            draft_bytes=work.pass_bytes + work.head_bytes,
            bandwidth_gb_s=self.bandwidth_gb_s,
        ).step_ms

    def _length(self, design: Design, sizes: DraftSizes, settings: dict[str, Any]) -> float:
        assumed = self.space.acceptance[design.family]
        size = _layer_parameters(design, sizes) / self._own_size(design.family)
        factor = assumed.factor(
            {"window": 0, **settings} if design.num_kv_heads else settings, where=self.space.name
        )
        k = design.num_speculative_tokens
        return expected_length(assumed.shares(k, size=size, factor=factor))

    def _own_size(self, family: str) -> int:
        if family not in self._own:
            table = {"family": family, "num_speculative_tokens": 1}
            try:
                design = build_design(table, self.shape)
                own = _layer_parameters(design, self._measure(design))
            except PacelineError:
                own = 1
            self._own[family] = own
        return self._own[family]

    def _measure(self, design: Design) -> DraftSizes:
        values = dataclasses.astuple(design)
        same = 1 if design.family == "medusa" else 0  # only its tensors depend on K
        key = (values[0], values[1] * same, *values[2:])
        if key not in self._sizes:
            self._sizes[key] = measure_design(design, self.shape, context_tokens=self.context)
        return self._sizes[key]

    def _use(self, design: Design | None, k: int) -> CacheUse:
        layers = draft_layers(design, self.shape, 1)[:1] if design is not None else []
        key = (k, design.num_layers if design is not None and layers else 0, *layers)
        if key not in self._caches:
            self._caches[key] = measure_cache(
                all_layers(design, self.shape, self.plan, k),
                context_tokens=self.context,
                in_flight_tokens=self.plan.in_flight_tokens,
            )
        return self._caches[key]


def _layer_parameters(design: Design, sizes: DraftSizes) -> int:
    total = sum(one.num_elements for one in sizes.tensors if one.part in ("layers", "fuse"))
    return max(1, total // (design.num_speculative_tokens if design.family == "medusa" else 1))
