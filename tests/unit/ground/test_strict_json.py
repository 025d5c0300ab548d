from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.problems import show_value
from paceline.strict_json import JsonLimits, scan_json


def problems(data: bytes, **limits: int) -> list[str]:
    _, found = scan_json(data, file="x.json", limits=JsonLimits(**limits))
    return [problem.rule for problem in found]


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"\xff{}", "json.utf8"),
        (b"\xef\xbb\xbf{}", "json.utf8"),
        (b'{"a": "\0"}', "json.utf8"),
        (b'{"a": "\\ud800"}', "json.utf8"),
        (b'{"a": 1, "a": 1}', "json.dup"),
        (b'[{"b": {"a": 1, "a": 2}}]', "json.dup"),
        (b'{"a": NaN}', "json.const"),
        (b'{"a": [-Infinity]}', "json.const"),
        (b'{"a": 9007199254740993}', "json.const"),
        (b'{"a": 1e999}', "json.const"),
        (b'{"a": 1e-999}', "json.const"),
        (b'{"a": ' + b"1" * 5000 + b"}", "json.const"),
        (b'{"a": 1', "json.syntax"),
        (b"", "json.syntax"),
        (b"{} {}", "json.syntax"),
        (b"{'a': 1}", "json.syntax"),
        (b"[" * 17 + b"]" * 17, "json.depth"),
        (b"[" + b"1," * 20_001 + b"1]", "json.depth"),
        (b'"' + b"x" * 4097 + b'"', "json.depth"),
        (b" " * 300_000, "json.depth"),
    ],
)
def test_refused(data: bytes, rule: str) -> None:
    assert rule in problems(data)


@pytest.mark.parametrize(
    "value",
    [{}, [], None, {"a": [1, -1.5, "é😀", True, None]}, 2**53, {"0.0": 0.0, "e": 0e5}, "[[[[{{"],
)
def test_accepted_as_it_is(value: object) -> None:
    data = json.dumps(value).encode()
    assert scan_json(data, file="x") == (value, [])


def test_brackets_and_commas_inside_strings_do_not_count() -> None:
    text = json.dumps(["[" * 100 + '\\"' + "," * 100])
    assert scan_json(text.encode(), file="x")[1] == []


def test_a_duplicate_names_its_key_and_keeps_the_last() -> None:
    value, found = scan_json(b'{"a": 1, "a": 2}', file="x.json")
    assert value == {"a": 2}
    assert (found[0].file, found[0].where) == ("x.json", "a")


@pytest.mark.parametrize("piece", [b'\\"', b"\\", b'"', b"[", b'"a', b"\\\\"])
def test_time_grows_with_the_size_only(piece: bytes) -> None:
    started = time.monotonic()
    problems(b'"' + piece * 500_000, max_bytes=10**8)
    assert time.monotonic() - started < 5


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_problem(data: bytes) -> None:
    value, found = scan_json(data, file="x")
    if not found:
        assert value == json.loads(data)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.integers() | st.lists(st.text()) | st.dictionaries(st.text(), st.text()))
def test_shown_values_are_one_short_printable_line(value: object) -> None:
    text = show_value(value)
    assert text.isprintable()
    assert len(text) <= 120
