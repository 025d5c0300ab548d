from __future__ import annotations

from paceline.serve.watch import MAX_CATEGORIES, OTHER, AcceptanceWatch, Window, read_counters

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 30.0
"""


def test_counters_out_of_the_text_of_vllm() -> None:
    assert read_counters(METRICS) == (40, 60)
    assert read_counters("vllm:generation_tokens_total 5.0\n") is None


def test_a_window_holds_the_last_steps_and_no_more_parts_than_it_needs() -> None:
    window = Window(10)
    assert window.acceptance_length is None
    window.add(8, 16)
    assert not window.is_full
    window.add(8, 0)
    assert window.is_full
    assert window.acceptance_length == 1 + 16 / 16  # both parts are needed for ten steps
    window.add(8, 0)
    assert window.acceptance_length == 1.0  # the first is out
    window.add(0, 0)
    assert window.num_steps == 16


def test_weak_only_after_enough_steps_and_anew_after_a_restart() -> None:
    watch = AcceptanceWatch(minimum=1.5, window=100)
    watch.forget()
    watch.read((50, 0))
    assert not watch.is_weak  # too few steps to say so
    watch.read((120, 10))
    assert watch.is_weak
    watch.read(None)
    watch.forget()
    watch.read((100, 80))
    assert not watch.is_weak
    assert watch.overall.acceptance_length == 1.8


def test_categories_are_judged_apart_and_bounded() -> None:
    watch = AcceptanceWatch(minimum=1.5, window=10)
    watch.add_answer("code", [{"num_spec_steps": 10, "num_accepted_draft_tokens": 20}])
    watch.add_answer("chat", [{"num_spec_steps": 6, "num_accepted_draft_tokens": 1}] * 2)
    assert watch.weak_categories() == ["chat"]
    # names stay bounded without a draft too, where no answer has a record
    names = {watch.note_category(f"c{number}") for number in range(2 * MAX_CATEGORIES)}
    assert len(names) == MAX_CATEGORIES + 1
    assert OTHER in names
    watch.forget()
    assert watch.note_category("one more") == OTHER
    assert watch.note_category("c0") == "c0"
