"""The engines behind `paceline tune`: one trial, and the gate on its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.cli.arms import build_arm_plan
from paceline.cli.bench import read_bench_text
from paceline.cli.tune_http import measure_through_http
from paceline.data import Thinking, build_requests, read_prompts
from paceline.endpoint import Answer, Endpoint, Sampling
from paceline.errors import EngineError, PlanError
from paceline.eval import (
    Regime,
    build_bench_requests,
    find_text_faults,
    measure_together,
)
from paceline.eval.fidelity import find_fork
from paceline.rules import Rules
from paceline.serve import (
    Plan,
    VllmEndpoint,
    apply_engine_settings,
    check_plan,
    measure_host_overhead,
    start,
    with_step_clock,
)
from paceline.target import TargetFacts
from paceline.tune import Settings

__all__ = ["EngineBench", "read_drafts"]

_NUM_WARM_UP = 2
_TEXT_TOKENS = 64
_CANDIDATES = 20
_WINDOWS = (256, 1024)  # tokens; the second is the one of the AdaptFM results


def read_drafts(target: TargetFacts) -> list[str]:
    """What is tried where no draft is named: the target's own head, and what has no weights."""
    return [*(["native"] if target.num_mtp_layers else []), "ngram", "suffix"]


class EngineBench:
    """Starts one engine a trial; implements paceline.tune.Bench."""

    def __init__(
        self,
        target: TargetFacts,
        regimes: Sequence[Regime],
        *,
        log_dir: Path,
        rules: Rules,
        num_requests: int,
        num_texts: int,
        concurrency: int,
        thinking: Thinking,
        device: str,
    ) -> None:
        self.target, self.rules, self.device = target, rules, device
        self.log_dir, self.concurrency = log_dir, concurrency
        self._longest = max(regime.prompt_tokens + regime.new_tokens for regime in regimes)
        total = sum(regime.prompt_tokens for regime in regimes) * (_NUM_WARM_UP + num_requests)
        self._requests = build_bench_requests(
            *read_bench_text(target, thinking, total),
            regimes,
            num_requests=num_requests,
            num_warm_up=_NUM_WARM_UP,
            repeated=False,
        )
        prompts = read_prompts("held-out").prompts[:num_texts]
        sampling = Sampling(max_tokens=_TEXT_TOKENS)
        self._texts = build_requests(prompts, target, sampling, thinking=thinking)
        longest = self._longest
        texts = max(len(request.prompt_ids) for request in self._texts) + _TEXT_TOKENS
        self._length = min(target.max_position_embeddings, max(longest, texts) + 33)
        if longest > target.max_position_embeddings:
            raise PlanError(
                f"a regime needs {longest:,} tokens",
                where=target.name,
                expected=f"at most {target.max_position_embeddings:,}, the target's positions",
                fix="Name shorter ones with --regime PROMPT:NEW.",
            )

    def require_drafts(self, names: Sequence[str]) -> None:
        """Raises what a plan of each draft raises, before anything is measured."""
        for name in names:
            check_plan(self.plan(Settings(draft=name)))

    def find_windows(self, name: str) -> tuple[int, ...] | str:
        """Windows to try on a draft's attention, or why it is left as it is."""
        from paceline.quantize import explain_no_window

        draft = self.plan(Settings(draft=name)).draft
        if draft is None:
            return "a draft without weights has no attention"
        reason = explain_no_window(draft)
        found = tuple(window for window in _WINDOWS if window < self._longest)
        return reason or found or f"no regime is longer than a window of {_WINDOWS[0]} tokens"

    def make_window(self, settings: Settings) -> Settings:
        """The same served, with the draft of another window as a folder of its own."""
        window = settings.drafter_window
        if window is None:
            return settings
        from paceline.quantize import Reshape, reshape_draft

        draft = self.plan(replace(settings, drafter_window=None)).draft
        assert draft is not None, "a window for a draft without weights"
        folder = self.log_dir / "drafts" / f"window-{window}-{draft.sha256[:12]}"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            reshape_draft(draft, self.target, Reshape(window=window), folder)
        return replace(settings, draft=str(folder), drafter_window=None)

    def plan(self, settings: Settings) -> Plan:
        settings = self.make_window(settings)
        plan = build_arm_plan(
            self.target,
            settings.draft,
            num_speculative_tokens=settings.k,
            max_model_len=self._length,
            max_num_seqs=self.concurrency,
            prefix_caching=settings.prefix_caching,
            enforce_eager=not settings.compiled,
            device=self.device,
        )
        return apply_engine_settings(plan, vars(settings))

    def measure(self, settings: Settings) -> dict[str, Any]:
        if settings.http:
            return measure_through_http(
                self.plan(settings),
                self._requests,
                self._texts,
                log_path=self.log_dir / "server.log",
            )
        plan = with_step_clock(self.plan(settings))
        check_plan(plan)
        with start(plan, log_path=self.log_dir / "engine.log") as endpoint:
            answers = endpoint.generate(self._texts, concurrency=self.concurrency)
            return {
                "k": plan.num_speculative_tokens or None,
                "method": plan.method,
                "regimes": self._measure(endpoint),
                "texts": [_keep(answer) for answer in answers],
                "host": self._measure_host(endpoint),
            }

    def judge(
        self, plain: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], *, again: bool
    ) -> tuple[list[list[str]], list[dict[str, Any]] | None]:
        texts = self._read_texts(plain)
        with start(self.plan(Settings()), log_path=self.log_dir / "engine.log") as endpoint:
            reasons = [self._find_faults(texts, trial, endpoint) for trial in trials]
            return reasons, self._measure(endpoint) if again else None

    def _find_faults(
        self, plain: Sequence[Answer], trial: Mapping[str, Any], endpoint: Endpoint
    ) -> list[str]:
        drafted = self._read_texts(trial)
        places = {}
        for one, other in zip(plain, drafted, strict=True):
            place = find_fork(one.output_ids, other.output_ids)
            if place is not None:
                places[one.request_id] = one.prompt_ids + one.output_ids[:place]
        choices = endpoint.next_token(list(places.values()), top=_CANDIDATES)
        return find_text_faults(
            plain, drafted, dict(zip(places, choices, strict=True)), self.rules
        )[0]

    def _read_texts(self, trial: Mapping[str, Any]) -> list[Answer]:
        return [
            Answer(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                output_ids=tuple(text["output_ids"]),
                finish_reason=text["finish_reason"],
                sent_at_s=0.0,
                chunk_times_s=(),
                chunk_tokens=(),
            )
            for request, text in zip(self._texts, trial["texts"], strict=True)
        ]

    def _measure_host(self, endpoint: VllmEndpoint) -> dict[str, Any] | None:
        """Of the first regime's first request; None where it cannot be measured."""
        warm_up, _ = next(iter(self._requests.values()))
        try:
            found = measure_host_overhead(endpoint, warm_up[0])
        except EngineError:  # a profiler may be forbidden; what was measured before stands
            return None
        return None if found is None else {**asdict(found), "host_ms": found.host_ms}

    def _measure(self, endpoint: Endpoint) -> list[dict[str, Any]]:
        return measure_together(
            endpoint, self._requests, concurrency=self.concurrency, gpu=self.device == "cuda"
        )


def _keep(answer: Answer) -> dict[str, Any]:
    return {"output_ids": list(answer.output_ids), "finish_reason": answer.finish_reason}
