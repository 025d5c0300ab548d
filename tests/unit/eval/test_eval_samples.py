"""Answers cut into steps, and steps into texts."""

from __future__ import annotations

from dataclasses import replace

from scripted import Script, Step, build_request, play

from paceline.endpoint import Answer
from paceline.eval import build_samples
from paceline.eval.samples import split_steps, token_texts

LETTERS = dict(enumerate("abcdefghij"))


def decode(ids: list[int]) -> str:
    return "".join(LETTERS.get(i, f"<{i}>") for i in ids)


def answer(*steps: Step, num_tokens: int) -> Answer:
    script = Script(steps=steps, num_tokens=num_tokens, tokens=tuple(range(num_tokens)))
    return play(script, build_request("q"), speculates=True, sent_at_s=0.0)


def test_steps_with_proposals() -> None:
    (sample,) = build_samples(
        [answer((2, 3), (0, 3), num_tokens=5)],
        decode,
        {"q": [[1, 2, 90], [91, 92, 93]]},
        categories={"q": "chat"},
        prompts={"q": "Hello"},
    )
    assert (sample["id"], sample["category"], sample["prompt"]) == ("q", "chat", "Hello")
    assert sample["steps"] == [
        {"accepted": [], "target": "a", "rejected": [], "num_rejected": 0},  # prefill
        {"accepted": ["b", "c"], "target": "d", "rejected": ["<90>"], "num_rejected": 1},
        {
            "accepted": [],
            "target": "e",
            "rejected": ["<91>", "<92>", "<93>"],
            "num_rejected": 3,
        },
    ]


def test_without_proposals_only_the_number_is_known() -> None:
    (sample,) = build_samples([answer((1, 3), num_tokens=3)], decode)
    assert sample["steps"][1]["rejected"] is None
    assert sample["steps"][1]["num_rejected"] == 2
    assert sample["prompt"] == "<113>"
    assert sample["category"] is None


def test_a_stop_inside_the_accepted_tokens() -> None:
    (sample,) = build_samples([answer((3, 3), num_tokens=3)], decode)
    assert sample["steps"][1] == {
        "accepted": ["b", "c"],
        "target": None,
        "rejected": [],
        "num_rejected": 0,
    }


def test_a_stop_at_the_last_accepted_token() -> None:
    (sample,) = build_samples([answer((2, 3), num_tokens=3)], decode)
    assert sample["steps"][1]["accepted"] == ["b", "c"]
    assert sample["steps"][1]["target"] is None
    assert sample["steps"][1]["num_rejected"] == 1


def test_steps_without_a_draft_lie_where_the_chunks_say() -> None:
    steps = split_steps(answer((2, 3), None, (1, 2), None, num_tokens=8))
    assert steps is not None
    assert [(s.start, s.num_accepted, s.drafting_step) for s in steps] == [
        (0, 0, None),
        (1, 2, 0),
        (4, 0, None),
        (5, 1, 1),
        (7, 0, None),
    ]


def test_a_cut_step_does_not_hide_a_step_without_a_draft() -> None:
    steps = split_steps(answer((2, 3), None, (3, 3), num_tokens=7))
    assert steps is not None
    assert [(s.start, s.num_accepted, s.num_own) for s in steps] == [
        (0, 0, 1),
        (1, 2, 1),
        (4, 0, 1),
        (5, 2, 0),
    ]


def test_an_answer_whose_steps_are_hidden_in_chunks_is_left_out() -> None:
    whole = answer((2, 3), None, (1, 2), num_tokens=7)
    hidden = replace(whole, chunk_tokens=(3, 4), chunk_times_s=(0.1, 0.2))
    assert split_steps(hidden) is None
    assert build_samples([hidden], decode) == []


def test_every_token_is_shown_once() -> None:
    for steps, num_tokens in (
        (((3, 3), (1, 3), (0, 3)), 8),
        (((0, 3), None, (3, 3)), 5),
        ((None,), 2),
        ((), 1),
    ):
        (sample,) = build_samples([answer(*steps, num_tokens=num_tokens)], decode)
        shown = [t for s in sample["steps"] for t in [*s["accepted"], s["target"]] if t]
        assert "".join(shown) == decode(list(range(num_tokens)))


def test_a_character_over_several_tokens() -> None:
    raw = "é!".encode()
    pieces = [raw[:1], raw[1:2], raw[2:]]

    def decode_bytes(ids: list[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")

    assert token_texts([0, 1, 2], decode_bytes) == ["", "é", "!"]
    assert token_texts([0], decode_bytes) == ["\ufffd"]
