from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_chat import ALWAYS_THINKS, FORGETS, PLAIN, START, SWITCH, make_chat_target

from paceline.data import (
    open_tokenizer,
    plain_thinking,
    read_prompts,
    read_rows,
    rows_from_conversations,
    show_rows,
)
from paceline.errors import DataError
from paceline.target import TargetFacts


def talk(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    }


def make_rows(tmp_path: Path, target: TargetFacts, *rows: object, **options: object) -> dict:
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows_from_conversations(read_prompts(path), target, tmp_path / "data", **options)


def test_u24_only_assistant_tokens_are_supervised(tmp_path: Path, target: TargetFacts) -> None:
    record = make_rows(tmp_path, target, talk("assistant", "abc", "user", "de"))
    (row,) = read_rows(tmp_path / "data")
    assert row.num_supervised == 7  # 3 + end token, 2 + end token
    tokenizer = open_tokenizer(target)
    spans = [tokenizer.decode(row.input_ids[start:end]) for start, end in row.loss_spans]
    assert spans == ["abc<e>", "de<e>"]
    assert tokenizer.decode(row.input_ids) == (
        "<s>user:assistant<e>\n<s>assistant:abc<e>\n<s>user:user<e>\n<s>assistant:de<e>"
    )
    # our shift: the span holds the labels, so the first label is the first token of the reply
    first = row.loss_spans[0][0]
    assert tokenizer.decode(row.input_ids[first : first + 1]) == "a"
    assert record["counts"]["supervised_tokens"] == 7
    assert record["counts"]["finish_reasons"] == {"given": 1}
    shown = show_rows(tmp_path / "data", target)
    assert "7 of" in shown
    assert "<s>assistant:⟦abc<e>⟧\n<s>user:user<e>\n<s>assistant:⟦de<e>⟧" in shown


def test_both_forms_give_the_same_ids(tmp_path: Path, target: TargetFacts) -> None:
    share = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "abc"}]
    make_rows(tmp_path, target, talk("q", "abc"), {"conversations": share})
    first, second = read_rows(tmp_path / "data")
    assert (first.input_ids, first.loss_spans) == (second.input_ids, second.loss_spans)


def test_prompt_ids_are_those_the_engine_gets(tmp_path: Path, target: TargetFacts) -> None:
    make_rows(tmp_path, target, talk("q", "abc", "r", "de"))
    (row,) = read_rows(tmp_path / "data")
    asked = open_tokenizer(target).encode_prompt(talk("q", "abc", "r")["messages"])
    assert row.input_ids[: row.loss_spans[1][0]] == asked


def test_a_tokenizer_that_adds_a_begin_token_adds_none_to_a_template(tmp_path: Path) -> None:
    """The template writes its own; a second one is a prompt that the target never saw."""
    target = make_chat_target(tmp_path / "t")
    path = target.path / "tokenizer.json"
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, a],
        "pair": [begin, a, b],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [START], "tokens": ["<s>"]}},
    }
    path.write_text(json.dumps(tokenizer))
    ids = open_tokenizer(target).encode_prompt(talk("q")["messages"])
    assert ids.count(START) == 2  # the user's turn and the assistant's


def test_unusable_conversations_are_named_and_counted(tmp_path: Path, target: TargetFacts) -> None:
    good = [talk("q", "abc")] * 4
    record = make_rows(tmp_path, target, *good, talk("q"), talk("q<e>", "a"), talk("q", "x" * 600))
    reasons = {item["line"]: item["reason"] for item in record["rejected"]}
    assert reasons[5] == "no assistant turn"
    assert "control token <e>" in reasons[6]
    assert "the target has 512 positions" in reasons[7]
    assert (record["counts"]["rows"], record["counts"]["rejected"]) == (4, 3)


def test_templates_that_rewrite_turns_are_refused(tmp_path: Path) -> None:
    target = make_chat_target(tmp_path / "forgets", template=FORGETS)
    two_turns = talk("q", "<think>t</think>abc", "r", "de")
    record = make_rows(tmp_path, target, talk("q", "<think>t</think>abc"), two_turns)
    assert record["counts"]["rows"] == 1
    assert "chat template" in record["rejected"][0]["reason"]


def test_a_template_that_raises_rejects_the_line(tmp_path: Path) -> None:
    """Some templates take no system turn and say so; others just break."""
    for name, check in (
        ("refuses", "{{ raise_exception('System role not supported') }}"),
        ("breaks", "{{ 1 + m['content'] }}"),
    ):
        template = "{% for m in messages %}{% if m['role'] == 'system' %}" + check
        template += "{% endif %}{% endfor %}" + PLAIN
        target = make_chat_target(tmp_path / name, template=template)
        spoken = talk("q", "abc")
        system = {"messages": [{"role": "system", "content": "s"}, *spoken["messages"]]}
        record = make_rows(tmp_path / name, target, spoken, system)
        assert record["counts"]["rows"] == 1
        assert "the chat template refuses" in record["rejected"][0]["reason"]
        with pytest.raises(DataError, match="the chat template refuses"):
            open_tokenizer(target).encode_prompt(system["messages"][:2])


def test_thinking_switch_must_be_chosen_and_have_an_effect(tmp_path: Path) -> None:
    switch = make_chat_target(tmp_path / "switch", template=SWITCH)
    with pytest.raises(DataError, match="thinks or not, as it is told"):
        open_tokenizer(switch)
    assert plain_thinking(switch) == "off"
    assert plain_thinking(make_chat_target(tmp_path / "no-switch")) == "none"
    plain = make_chat_target(tmp_path / "plain")
    with pytest.raises(DataError, match="thinking off has no effect"):
        open_tokenizer(plain, thinking="off")
    always = make_chat_target(tmp_path / "always", template=ALWAYS_THINKS)
    with pytest.raises(DataError, match="has no effect"):
        open_tokenizer(always, thinking="on")
    without = make_chat_target(tmp_path / "without", template=None)
    with pytest.raises(DataError, match="no chat template"):
        open_tokenizer(without)


def test_only_unusable_conversations_is_an_error(tmp_path: Path, target: TargetFacts) -> None:
    with pytest.raises(DataError, match="1 of 1 prompts were rejected"):
        make_rows(tmp_path, target, talk("q"))
