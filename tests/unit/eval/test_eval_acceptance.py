"""Steps whose figures are known by hand, against our definition and vLLM's."""

from __future__ import annotations

import pytest
from scripted import Script, ScriptedEndpoint, build_facts, build_request, play

from paceline.acceptance import bench_tau
from paceline.endpoint import Answer, Counters
from paceline.errors import ResultError
from paceline.eval.acceptance import (
    compute_tau,
    count_request_steps,
    describe_acceptance,
    read_counters_acceptance,
    subtract_counters,
)


def answer(*steps: tuple[int, int] | None, num_tokens: int) -> Answer:
    script = Script(steps=steps, num_tokens=num_tokens)
    return play(script, build_request("a"), speculates=True, sent_at_s=0.0)


def counters(steps: int, drafted: int, accepted: int, *at: int) -> Counters:
    return Counters(
        num_drafts=steps,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=at,
    )


def test_bonus_token_is_delivered() -> None:
    # prefill 1, then 2+1 and 0+1: five tokens, D = 4, S = 2
    counts = count_request_steps(answer((2, 3), (0, 3), num_tokens=5), num_speculative_tokens=3)
    assert (counts.delivered, counts.steps) == (4, 2)
    assert counts.acceptance.acceptance_length == 2.0  # 1 + 2/2: agrees, nothing was cut


def test_stop_inside_accepted_tokens_is_not_delivered() -> None:
    # the last step accepts 3 and would yield 4, the stop leaves 1: D = 1 + 3 = 4, not 7
    counts = count_request_steps(answer((2, 3), (3, 3), num_tokens=5), num_speculative_tokens=3)
    assert (counts.delivered, counts.steps) == (4, 2)
    assert counts.acceptance.acceptance_length == 3.5  # vLLM's own: 1 + 5/2, flattered
    assert compute_tau({"a": [(counts.delivered, counts.steps)]}).value == 2.0


def test_steps_without_a_draft_count() -> None:
    # 2+1, none, none, 1+1: eight tokens, D = 7, S = 4; vLLM sees two steps
    counts = count_request_steps(
        answer((2, 3), None, None, (1, 2), num_tokens=8), num_speculative_tokens=3
    )
    assert (counts.delivered, counts.steps) == (7, 4)
    assert counts.acceptance.num_steps == 2
    assert counts.acceptance.acceptance_length == 2.5


def test_a_stop_does_not_hide_steps_without_a_draft() -> None:
    # 2+1, none, then 3+1 cut to 2: D = 3 + 1 + 2 = 6 in S = 3 steps; the record alone says
    # 2 steps worth 7 tokens, which would leave no room for the step without a draft
    cut = answer((2, 3), None, (3, 3), num_tokens=7)
    counts = count_request_steps(cut, num_speculative_tokens=3)
    assert (counts.delivered, counts.steps) == (6, 3)


def test_no_speculation_is_one_token_a_step() -> None:
    plain = play(
        Script(steps=(None,) * 9, num_tokens=10), build_request("a"), speculates=False, sent_at_s=0
    )
    counts = count_request_steps(plain, num_speculative_tokens=0)
    assert (counts.delivered, counts.steps) == (9, 9)


def test_one_token_answer_has_no_step() -> None:
    counts = count_request_steps(answer(num_tokens=1), num_speculative_tokens=3)
    assert (counts.delivered, counts.steps) == (0, 0)
    assert compute_tau({"a": [(0, 0)]}).value is None


def test_chunks_of_several_steps_change_nothing() -> None:
    one = answer((2, 3), (0, 3), (1, 3), num_tokens=7)
    coalesced = Answer(
        **{**vars(one), "chunk_tokens": (4, 3), "chunk_times_s": (0.1, 0.2)},
    )
    a = count_request_steps(one, num_speculative_tokens=3)
    assert a == count_request_steps(coalesced, num_speculative_tokens=3)


def test_speculation_without_a_record_is_refused() -> None:
    plain = play(
        Script(steps=(None,), num_tokens=2), build_request("a"), speculates=False, sent_at_s=0
    )
    with pytest.raises(ResultError, match="no per-step record"):
        count_request_steps(plain, num_speculative_tokens=3)


def test_a_last_step_without_a_token_is_refused() -> None:
    """The steps before it account for every delivered token already: 2 + 1 of 3."""
    full = {**vars(answer((1, 3), (0, 3), num_tokens=4)), "per_step_drafted": (3, 3, 3)}
    with pytest.raises(ResultError, match="3 drafting steps for 3 delivered"):
        count_request_steps(
            Answer(**{**full, "per_step_accepted": (1, 0, 0)}), num_speculative_tokens=3
        )


def test_more_steps_than_tokens_is_refused() -> None:
    broken = Answer(
        **{
            **vars(answer((0, 3), num_tokens=2)),
            "per_step_accepted": (1, 0),
            "per_step_drafted": (3, 3),
        }
    )
    with pytest.raises(ResultError, match="2 drafting steps for 1 delivered"):
        count_request_steps(broken, num_speculative_tokens=3)


def test_u33_figures_of_a_run() -> None:
    figures = describe_acceptance(read_counters_acceptance(counters(100, 300, 150, 90, 40, 20)))
    assert figures["acceptance_length"] == 2.5
    assert figures["acceptance_rate"] == 0.5
    assert figures["position_acceptance"] == [0.9, 0.4, 0.2]
    assert figures["conditional_acceptance"] == pytest.approx([0.9, 4 / 9, 0.5])


def test_u33_counters_are_cumulative() -> None:
    run = subtract_counters(counters(1100, 3300, 2650, 9), counters(1000, 3000, 2500, 4))
    acceptance = read_counters_acceptance(run)
    assert acceptance.acceptance_length == 2.5  # not 3.41
    assert acceptance.accepted_at == (5,)


def test_u33_batches_are_summed_not_averaged() -> None:
    first = count_request_steps(answer((3, 3), (1, 3), num_tokens=7), num_speculative_tokens=3)
    second = count_request_steps(answer((2, 3), (0, 3), num_tokens=5), num_speculative_tokens=3)
    both = first.acceptance + second.acceptance
    assert both.accepted_per_step == 1.5  # 6 accepted in 4 steps
    assert both.acceptance_length == 2.5


def test_u33_no_step_is_not_measured() -> None:
    figures = describe_acceptance(read_counters_acceptance(counters(0, 0, 0, 0, 0, 0)))
    assert figures["acceptance_length"] is None
    assert figures["acceptance_rate"] is None
    assert figures["position_acceptance"] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (counters(10, 30, 9, 9), counters(3, 9, 2, 2)),
        (counters(10, 30, 9, 9), counters(11, 33, 9, 8)),
    ],
)
def test_u33_restarted_server_is_an_error(before: Counters, after: Counters) -> None:
    with pytest.raises(ResultError, match="server restarted"):
        subtract_counters(after, before)


def test_unknown_prefix_counters_stay_unknown() -> None:
    assert subtract_counters(counters(1, 1, 1), counters(0, 0, 0)).prefix_cache_hits is None


def test_tau_is_the_unweighted_mean_over_categories() -> None:
    # code: 12/6 = 2; chat: 4/4 = 1; pooled would be 16/10 = 1.6
    tau = compute_tau({"code": [(9, 3), (3, 3)], "chat": [(4, 4)], "empty": [(0, 0)]})
    assert tau.by_category == {"code": 2.0, "chat": 1.0, "empty": None}
    assert tau.value == 1.5


def test_transcripts_and_counters_agree() -> None:
    """The same steps, counted per request and by the engine's counters, give the same figures."""
    scripts = {
        "a": Script(steps=((3, 3), (1, 3), None, (0, 2)), num_tokens=9),
        "b": Script(steps=((2, 3), (3, 3)), num_tokens=6),  # the stop cuts 3+1 to 2
    }
    endpoint = ScriptedEndpoint(build_facts("eagle3", 3), scripts)
    before = endpoint.counters()
    answers = endpoint.generate([build_request("a"), build_request("b")])
    own = read_counters_acceptance(subtract_counters(endpoint.counters(), before))
    counts = [count_request_steps(a, num_speculative_tokens=3) for a in answers]
    assert counts[0].acceptance + counts[1].acceptance == own
    # vLLM: 1 + 9/5 = 2.8; delivered: a 8 in 4 steps, b 5 in 2: (8 + 5) / 6
    assert own.acceptance_length == 2.8
    tau = compute_tau({"x": [(c.delivered, c.steps) for c in counts]})
    assert tau.value == pytest.approx(13 / 6)
    # the documented correction: undo the two tokens cut by the stop, add the step without a draft
    drafting, accepted, cut, no_draft = own.num_steps, own.num_accepted, 2, 1
    assert tau.value == (drafting + accepted - cut + no_draft) / (drafting + no_draft)


def test_tau_from_the_lists_of_vllm_bench_serve() -> None:
    # two answers of 5 and 4 tokens in 2 and 3 chunks after the first
    assert bench_tau([5, 4], [[0.01, 0.01], [0.01] * 3]) == 7 / 5
    assert bench_tau([1], [[]]) is None
    with pytest.raises(ResultError, match="1 output_lens but 2 itls"):
        bench_tau([5], [[0.1], [0.1]])
