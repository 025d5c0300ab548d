"""One transcript of steps, three bookkeepers: ours, vLLM's counters, `vllm bench serve`.

vLLM's own classes and formulas do their part here; no engine is started. The cases are worked out
by hand beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from paceline.acceptance import bench_tau
from paceline.endpoint import Answer, Counters
from paceline.eval.acceptance import (
    compute_tau,
    count_request_steps,
    describe_acceptance,
    read_counters_acceptance,
    subtract_counters,
)

pytestmark = pytest.mark.engine

K = 3
STEP_S = 0.010
Step = tuple[int, int] | None  # (accepted, drafted), None without a draft


@dataclass(frozen=True)
class Case:
    """steps of one answer, cut to num_tokens; tau and vLLM's acceptance length by hand."""

    name: str
    steps: tuple[Step, ...]
    num_tokens: int
    tau: float
    vllm_length: float | None


CASES = (
    # prefill 1, then 2 + 1 and 0 + 1: 4 delivered in 2 steps; nothing was cut, so both agree
    Case("bonus token", ((2, 3), (0, 3)), 5, 2.0, 2.0),
    # the last step would yield 4, the stop leaves 1: 4 in 2; vLLM counts 5 accepted in 2
    Case("stop inside accepted tokens", ((2, 3), (3, 3)), 5, 2.0, 3.5),
    # 3 + 1 + 1 + 2 = 7 in 4; vLLM sees 3 accepted in 2 steps
    Case("steps without a draft", ((2, 3), None, None, (1, 2)), 8, 7 / 4, 2.5),
    # 3 + 1 and a step cut to 2: 6 in 3
    Case("a stop after a step without a draft", ((2, 3), None, (3, 3)), 7, 2.0, 3.5),
    Case("no draft at all", (None, None, None), 4, 1.0, None),
)


def chunks_of(case: Case) -> list[int]:
    sizes = [1]
    for step in case.steps:
        sizes.append(min(1 + (step[0] if step else 0), case.num_tokens - sum(sizes)))
    assert sum(sizes) == case.num_tokens
    return sizes


def answer(case: Case) -> Answer:
    sizes = chunks_of(case)
    drafting = [step for step in case.steps if step is not None]
    return Answer(
        request_id=case.name,
        prompt_ids=(1,),
        output_ids=tuple(range(case.num_tokens)),
        finish_reason="stop",
        sent_at_s=0.0,
        chunk_times_s=tuple(0.1 + STEP_S * i for i in range(len(sizes))),
        chunk_tokens=tuple(sizes),
        per_step_accepted=tuple(took for took, _ in drafting),
        per_step_drafted=tuple(offered for _, offered in drafting),
    )


def count_as_vllm(cases: tuple[Case, ...], start: Counters | None = None) -> Counters:
    """The scheduler's own bookkeeping: SpecDecodingStats, a step without a draft is not seen."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    stats = SpecDecodingStats.new(K)
    for case in cases:
        for step in case.steps:
            if step is not None:
                stats.observe_draft(num_draft_tokens=step[1], num_accepted_tokens=step[0])
    zero = Counters(
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_accepted_tokens_per_pos=(0,) * K,
    )
    start = start or zero
    return Counters(
        num_drafts=start.num_drafts + stats.num_drafts,
        num_draft_tokens=start.num_draft_tokens + stats.num_draft_tokens,
        num_accepted_tokens=start.num_accepted_tokens + stats.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(
            a + b
            for a, b in zip(
                start.num_accepted_tokens_per_pos, stats.num_accepted_tokens_per_pos, strict=True
            )
        ),
    )


def bench_outputs(cases: tuple[Case, ...]) -> list[Any]:
    """What `vllm bench serve` notes of each request: one gap a chunk after the first."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    outputs = []
    for case in cases:
        own = answer(case)
        gaps = [b - a for a, b in zip(own.chunk_times_s, own.chunk_times_s[1:], strict=False)]
        outputs.append(
            RequestFuncOutput(
                success=True,
                latency=own.chunk_times_s[-1],
                output_tokens=case.num_tokens,
                ttft=own.chunk_times_s[0],
                itl=gaps,
            )
        )
    return outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_answer_three_bookkeepers(case: Case) -> None:
    counts = count_request_steps(answer(case), num_speculative_tokens=K)
    ours = compute_tau({"a": [(counts.delivered, counts.steps)]}).value
    assert ours == pytest.approx(case.tau, rel=1e-15)

    counted = describe_acceptance(read_counters_acceptance(count_as_vllm((case,))))
    assert counted == describe_acceptance(counts.acceptance)
    assert counted["acceptance_length"] == case.vllm_length

    (output,) = bench_outputs((case,))
    assert bench_tau([output.output_tokens], [output.itl]) == pytest.approx(case.tau, rel=1e-15)


def test_a_run_of_all_of_them() -> None:
    """Sums over requests, never means of means; TPOT by vLLM's own function."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import calculate_metrics

    pairs = [
        (counts.delivered, counts.steps)
        for case in CASES
        for counts in (count_request_steps(answer(case), num_speculative_tokens=K),)
    ]
    # delivered 4 + 4 + 7 + 6 + 3 = 24; steps 2 + 2 + 4 + 3 + 3 = 14
    assert compute_tau({"a": pairs}).value == 24 / 14
    outputs = bench_outputs(CASES)
    lengths = [output.output_tokens for output in outputs]
    assert bench_tau(lengths, [output.itl for output in outputs]) == 24 / 14

    # vLLM's counters: 8 drafting steps with 2+0 + 2+3 + 2+1 + 2+3 = 15 accepted
    counters = count_as_vllm(CASES)
    assert (counters.num_drafts, counters.num_accepted_tokens) == (8, 15)
    figures = describe_acceptance(read_counters_acceptance(counters))
    assert figures["acceptance_length"] == 1 + counters.num_accepted_tokens / counters.num_drafts
    assert figures["position_acceptance"] == [
        count / counters.num_drafts for count in counters.num_accepted_tokens_per_pos
    ]

    requests = [SampleRequest(prompt="", prompt_len=1, expected_output_len=1) for _ in outputs]
    metrics, found_lengths = calculate_metrics(requests, outputs, 1.0, None, [50.0], {})
    assert found_lengths == lengths
    ours = [answer(case).tpot_ms or 0.0 for case in CASES]
    assert metrics.mean_tpot_ms == pytest.approx(sum(ours) / len(ours), rel=1e-9)
    # time between chunks is not time between tokens: a chunk holds several
    assert metrics.mean_itl_ms == pytest.approx(STEP_S * 1000, rel=1e-9)
    assert metrics.mean_tpot_ms < metrics.mean_itl_ms


def test_counters_go_on_across_runs_and_a_restart_is_no_run() -> None:
    before = count_as_vllm(CASES[:2])
    after = count_as_vllm(CASES[2:4], before)
    assert subtract_counters(after, before) == count_as_vllm(CASES[2:4])
    from paceline.errors import ResultError

    with pytest.raises(ResultError, match="restarted"):
        subtract_counters(count_as_vllm(CASES[2:3]), after)


def test_coalesced_chunks_need_the_per_step_record() -> None:
    """A client that got two steps in one chunk: our figure stands, the bench's cannot."""
    own = answer(CASES[0])
    merged = Answer(**{**vars(own), "chunk_tokens": (1, 4), "chunk_times_s": (0.1, 0.12)})
    counts = count_request_steps(merged, num_speculative_tokens=K)
    assert (counts.delivered, counts.steps) == (4, 2)
    assert merged.tpot_ms == pytest.approx(5.0)
    assert bench_tau([5], [[0.02]]) == 4.0  # why one request at a time and interval 1 are needed
