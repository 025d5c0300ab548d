"""Streams continued on another server: what is asked, what the client sees, where it is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.serve.resume import BrokenStream, LostStream, Stream, explain_not_resumable

WORDS = {1: "one", 2: " two", 3: " three", 4: " four", 5: "", 6: "é", 7: " end"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stream": True}
PLAIN: dict[str, Any] = {"prompt": "x", "stream": True, "max_tokens": 9}


def decode(prompt_ids: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Token 5 is the first half of a character, 6 its second."""
    assert tuple(prompt_ids) == (10, 11)
    return [WORDS[token] for token in ids]


def completion(ids: list[int], text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids, **more}
    return {"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def chat(ids: list[int], delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [choice]}


def usage(prompt: int, new: int) -> dict[str, Any]:
    record = {"num_spec_steps": 2, "num_accepted_draft_tokens": 3}
    found = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {"id": "z", "choices": [], "usage": found, "metrics": {"speculative_decoding": record}}


def begin(body: dict[str, Any], *, is_chat: bool = False) -> Stream:
    stream = Stream(body, chat=is_chat, max_model_len=100)
    first = stream.first_body()
    assert first["return_token_ids"] is True
    assert first["stream_options"] == {"include_usage": True}
    if is_chat:
        head = chat([], {"role": "assistant", "content": ""})
        stream.take({**head, "prompt_token_ids": [10, 11]})
    return stream


def test_an_undisturbed_stream_passes_without_what_only_the_front_asked_for() -> None:
    stream = begin(PLAIN)
    shown = stream.take(completion([1, 2], "one two", prompt_token_ids=[10, 11]))
    assert shown is not None
    assert shown["choices"][0] == {"index": 0, "text": "one two", "finish_reason": None}
    assert stream.take(completion([7], " end", "stop")) is not None
    assert stream.take(usage(2, 3)) is None
    assert stream.is_finished
    assert stream.last_events() == []
    assert [record["num_spec_steps"] for record in stream.speculation] == [2]


def test_the_rest_is_asked_from_the_tokens_sent_and_usage_counts_all() -> None:
    body = {**PLAIN, "temperature": 0.0, "seed": 5, "min_tokens": 4, "stop": ["!!"]}
    stream = begin({**body, "stream_options": {"include_usage": True}})
    stream.take(completion([1, 2], "one two", prompt_token_ids=[10, 11]))
    asked = stream.next_body(decode)
    assert asked["prompt"] == [10, 11, 1, 2]
    assert (asked["max_tokens"], asked["min_tokens"], asked["seed"]) == (7, 2, 7)
    assert (asked["temperature"], asked["stop"]) == (0.0, ["!!"])
    again = {**completion([3], " three", prompt_token_ids=[10, 11, 1, 2]), "id": "other"}
    shown = stream.take(again)
    assert shown is not None
    assert (shown["id"], shown["choices"][0]["text"]) == ("a", " three")
    assert "token_ids" not in shown["choices"][0]
    stream.take(completion([7], " end", "stop"))
    stream.take(usage(4, 2))
    (last,) = stream.last_events()
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert last["id"] == "a"


def test_a_chat_goes_on_in_its_own_form_and_length() -> None:
    stream = begin(CHAT, is_chat=True)
    stream.take(chat([1], {"content": "one"}))
    asked = stream.next_body(decode)
    assert asked["prompt"] == [10, 11, 1]
    assert asked["max_tokens"] == 100 - 2 - 1
    assert "messages" not in asked
    shown = stream.take(completion([2], " two"))
    assert shown is not None
    assert shown["object"] == "chat.completion.chunk"
    assert shown["choices"][0]["delta"] == {"content": " two"}
    end = stream.take(completion([7], " end", "length"))
    assert end is not None
    assert end["choices"][0]["finish_reason"] == "length"
    assert stream.is_finished


def test_a_chat_that_only_said_its_role_is_asked_from_the_start() -> None:
    stream = begin(CHAT, is_chat=True)
    assert stream.has_begun
    assert stream.next_body(decode)["prompt"] == [10, 11]


def test_half_a_character_is_generated_again() -> None:
    stream = begin(PLAIN)
    stream.take(completion([1, 5], "one", prompt_token_ids=[10, 11]))
    asked = stream.next_body(decode)
    assert asked["prompt"] == [10, 11, 1]  # token 5 has sent no text
    shown = stream.take(completion([5, 6], "é"))
    assert shown is not None
    assert shown["choices"][0]["text"] == "é"
    assert stream.next_body(decode)["prompt"] == [10, 11, 1, 5, 6]  # lost a second time


def test_text_held_back_for_a_stop_string_is_repeated_once_and_compared() -> None:
    body = {**PLAIN, "stop": ["xyz"]}
    stream = begin(body)
    stream.take(completion([1, 2, 3], "one two th", prompt_token_ids=[10, 11]))  # "ree" held back
    assert stream.next_body(decode)["prompt"] == [10, 11, 1, 2]
    shown = stream.take(completion([3], " thr"))
    assert shown is not None
    assert shown["choices"][0]["text"] == "r"
    other = begin(body)
    other.take(completion([1, 2, 3], "one two th", prompt_token_ids=[10, 11]))
    other.next_body(decode)
    with pytest.raises(BrokenStream):
        other.take(completion([4], " four"))
    ended = begin(body)
    ended.take(completion([1, 2, 3], "one two th", prompt_token_ids=[10, 11]))
    ended.next_body(decode)
    with pytest.raises(BrokenStream):
        ended.take(completion([], " t", "stop"))


def test_token_ids_that_the_client_holds_never_come_twice() -> None:
    stream = begin({**PLAIN, "return_token_ids": True})
    shown = stream.take(completion([1, 5], "one", prompt_token_ids=[10, 11]))
    assert shown is not None
    assert shown["choices"][0]["token_ids"] == [1, 5]
    with pytest.raises(BrokenStream):
        stream.next_body(decode)


def test_an_aborted_answer_is_a_lost_server() -> None:
    stream = begin(PLAIN)
    with pytest.raises(LostStream):
        stream.take(completion([], "", "abort"))


@pytest.mark.parametrize(
    ("more", "obstacle"),
    [
        ({}, None),
        ({"n": 1, "frequency_penalty": 0, "logprobs": None}, None),
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logprobs": 5}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"a_parameter_of_tomorrow": 1}, "a_parameter_of_tomorrow"),
    ],
)
def test_only_what_is_known_to_go_on_exactly_goes_on(
    more: dict[str, Any], obstacle: str | None
) -> None:
    found = explain_not_resumable({**PLAIN, **more})
    assert (found or "").rpartition(".")[2] == (obstacle or "")


def test_an_answer_of_two_choices_is_finished_with_the_second() -> None:
    stream = Stream({**PLAIN, "n": 2}, chat=False, max_model_len=100)
    assert "return_token_ids" not in stream.first_body()
    stream.take(completion([], "x", "stop"))
    assert not stream.is_finished
    stream.take(json.loads(json.dumps(completion([], "y", "length"))))
    assert stream.is_finished
