"""The counters that Paceline reads, added up from hand-made records of steps."""

from __future__ import annotations

from types import SimpleNamespace

from paceline.serve.step_counts import StepCounts


def step(queries: int, hits: int, *accepted: int) -> SimpleNamespace:
    """A step's record: one entry of `accepted` a drafting request, three drafted tokens each."""
    cache = SimpleNamespace(queries=queries, hits=hits)
    if not accepted:
        return SimpleNamespace(prefix_cache_stats=cache, spec_decoding_stats=None)
    speculation = SimpleNamespace(
        num_drafts=len(accepted),
        num_draft_tokens=3 * len(accepted),
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=[sum(took > place for took in accepted) for place in range(3)],
    )
    return SimpleNamespace(prefix_cache_stats=cache, spec_decoding_stats=speculation)


def test_steps_add_up() -> None:
    counts = StepCounts(3)
    for one in (step(7, 4), step(0, 0, 2, 0), step(5, 5, 3)):
        counts.record(one, None, mm_cache_stats=None, engine_idx=0)
    counts.record(None, None)  # a step of which the scheduler says nothing
    assert counts.read() == {
        "prefix_cache_queries": 12,
        "prefix_cache_hits": 9,
        "spec_decode_num_drafts": 3,
        "spec_decode_num_draft_tokens": 9,
        "spec_decode_num_accepted_tokens": 5,
        "spec_decode_num_accepted_tokens_per_pos": [2, 2, 1],
    }


def test_a_reading_is_not_changed_by_later_steps() -> None:
    counts = StepCounts(3)
    counts.record(step(0, 0, 1))
    before = counts.read()
    counts.record(step(0, 0, 3))
    assert before["spec_decode_num_accepted_tokens_per_pos"] == [1, 0, 0]
    assert counts.read()["spec_decode_num_accepted_tokens_per_pos"] == [2, 1, 1]


def test_nothing_was_counted_yet() -> None:
    """As vLLM's own: a position that was never accepted is 0, and without a draft there is none."""
    for k in (0, 3):
        found = StepCounts(k).read()
        assert found.pop("spec_decode_num_accepted_tokens_per_pos") == [0] * k
        assert set(found.values()) == {0}
