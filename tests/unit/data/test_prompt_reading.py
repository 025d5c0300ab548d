from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.data import read_prompts, require_few_rejected
from paceline.errors import DataError

OK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
U23 = [
    OK,
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]},
    {"text": "a"},
]


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_u23_two_kept_four_named(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path / "p.jsonl", list(U23)))
    assert [prompt.line for prompt in found.prompts] == [1, 2]
    assert found.prompts[0].messages == found.prompts[1].messages
    assert dict(found.rejected) == {
        3: "turn 2: the user speaks where the assistant should",
        4: "turn 1: the assistant speaks where the user should",
        5: "turn 2: the assistant says nothing",
        6: 'none of "messages", "conversations" and "prompt"',
    }
    assert len(found.prompts) + len(found.rejected) == 6
    with pytest.raises(DataError, match="4 of 6 prompts were rejected"):
        require_few_rejected(found)
    require_few_rejected(found, max_rejected_share=0.7)


def test_plain_prompts_system_turns_ids_and_categories(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Hello", "category": "chat", "id": "one"},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]},
    ]
    found = read_prompts(write(tmp_path / "p.jsonl", list(rows)))
    first, second = found.prompts
    assert (first.prompt_id, first.category) == ("one", "chat")
    assert (second.prompt_id, second.category) == ("line-2", "other")
    assert [message["role"] for message in second.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": "a", "prompt": "b"}', "appears twice"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'["a"]', "not a JSON object"),
        (b'{"prompt": 3}', "the user says nothing"),
        (b'{"prompt": "a", "messages": []}', "several of"),
        (b'{"messages": []}', "no turns"),
        (b'{"messages": ["a"]}', "not a known speaker"),
        (b'{"conversations": [{"from": "tool", "value": "x"}]}', "is tool, not a known speaker"),
        (b'{"messages": [{"role": "system", "content": "s"}]}', "no user turn"),
        (b'{"prompt": "a", "category": 1}', '"category" is not text'),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "id": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "category": "\\udc00"}', "surrogate"),
        (b'{"prompt": "a", "id": 1e999}', "does not fit a double"),
        (b'{"prompt": "x", "id": "same"}', "used by an earlier line"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "good", "id": "same"}\n\n' + line + b"\n")
    found = read_prompts(path)
    assert len(found.prompts) == 1
    assert [number for number, _ in found.rejected] == [3]
    assert reason in found.rejected[0][1]


def test_a_reason_quotes_little_of_the_line(tmp_path: Path) -> None:
    row = {"messages": [{"role": ["\x1b[2J" * 50_000], "content": "x"}]}
    found = read_prompts(write(tmp_path / "p.jsonl", [OK, row]))
    assert len(found.rejected[0][1]) < 200
    assert found.rejected[0][1].isprintable()


def test_files_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such prompt file"):
        read_prompts("absent.jsonl")
    with pytest.raises(DataError, match="not a file"):
        read_prompts(tmp_path)
    (tmp_path / "p.jsonl").write_text("nonsense\n")
    with pytest.raises(DataError, match=r"no usable prompt \(line 1: not valid JSON"):
        read_prompts(tmp_path / "p.jsonl")


def test_hash_follows_content_not_formatting(tmp_path: Path) -> None:
    one = read_prompts(write(tmp_path / "a.jsonl", [OK]))
    (tmp_path / "b.jsonl").write_text(json.dumps(OK, separators=(",", ":")))
    assert read_prompts(tmp_path / "b.jsonl").sha256 == one.sha256
    other = read_prompts(write(tmp_path / "c.jsonl", [{"prompt": "Hi!"}]))
    assert other.sha256 != one.sha256


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
ODD_ROWS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "conversations", "prompt", "role", "content", "from", "id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40) | ODD_ROWS.map(lambda row: json.dumps(row).encode())))
def test_any_file_is_read_or_refused(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + b"\n".join(lines))
    found = read_prompts(path)
    num_lines = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    assert len(found.prompts) + len(found.rejected) == num_lines
