"""The ledger: what a reader of the file can find out about it."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path

import pytest

from paceline.errors import ResultError
from paceline.judge.ledger import (
    build_line,
    export_lines,
    parse_lines,
    read_key,
    read_lines,
)

KEY = bytes(range(32))


def build(num_lines: int) -> list[str]:
    lines: list[str] = []
    for number in range(num_lines):
        body = {"kind": "result", "content_sha256": f"{number:064d}", "round": 0, "name": "dé"}
        lines.append(build_line(KEY, body, seq=number, before=lines[-1] if lines else ""))
    return lines


def test_a_line_by_hand() -> None:
    first, second = build(2)
    record = json.loads(second)
    assert record["body"]["previous"] == hashlib.sha256(first.encode()).hexdigest()
    text = json.dumps(record["body"], sort_keys=True, separators=(",", ":"))
    assert record["hmac"] == hmac.new(KEY, text.encode(), "sha256").hexdigest()
    assert [body["seq"] for body in parse_lines([first, second], where="x", key=KEY)] == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0], lines[2]], "x:2: does not follow"),
        (lambda lines: [lines[1], lines[0], lines[2]], "x:1: does not follow"),
        (lambda lines: [lines[0], lines[1].replace('"round": 0', '"round": 1'), lines[2]], "x:2: "),
        (lambda lines: [*lines[:2], lines[2].replace("dé", "me")], "x:3: the signature"),
        (lambda lines: [*lines, lines[2]], "x:4: does not follow"),
        (lambda lines: [*lines, "{}"], "x:4: is not a line"),
        (lambda lines: [*lines, "{"], "x:4: not valid JSON"),
        (lambda lines: [lines[0].replace("paceline-judge/1", "paceline-judge/9")], "x:1: format"),
    ],
)
def test_every_change_is_found(change: object, message: str) -> None:
    lines = [line.replace("d\\u00e9", "dé") for line in build(3)]
    chained = [lines[0]]  # the replacement above changed the text that is chained: chain again
    for number in (1, 2):
        body = {"kind": "result", "content_sha256": f"{number:064d}", "round": 0, "name": "dé"}
        chained.append(
            build_line(KEY, body, seq=number, before=chained[-1]).replace("d\\u00e9", "dé")
        )
    assert len(parse_lines(chained, where="x", key=KEY)) == 3
    with pytest.raises(ResultError, match=message):
        parse_lines(change(chained), where="x", key=KEY)  # type: ignore[operator]


def test_a_changed_line_is_found_without_the_key_by_the_line_after_it() -> None:
    lines = build(3)
    changed = [lines[0], lines[1].replace('"round": 0', '"round": 1'), lines[2]]
    with pytest.raises(ResultError, match="x:3: does not follow"):
        parse_lines(changed, where="x")


def test_a_rewritten_chain_needs_the_key() -> None:
    other = bytes(32)
    body = {"kind": "result", "content_sha256": "0" * 64, "round": 0}
    line = build_line(other, body, seq=0, before="")
    assert len(parse_lines([line], where="x")) == 1  # whoever has no key sees a whole chain
    with pytest.raises(ResultError, match="signature is not this judge's"):
        parse_lines([line], where="x", key=KEY)


def test_the_same_draft_twice_is_an_error() -> None:
    first = build(1)[0]
    body = {"kind": "result", "content_sha256": f"{0:064d}", "round": 0}
    again = build_line(KEY, body, seq=1, before=first)
    with pytest.raises(ResultError, match="two such lines"):
        parse_lines([first, again], where="x", key=KEY)


def test_export_appends_only(tmp_path: Path) -> None:
    path, lines = tmp_path / "results.jsonl", build(4)
    assert export_lines(path, lines[:2]) == 2
    assert export_lines(path, lines[:2]) == 0
    for cut in range(1, 40):  # a kill inside the append, at every byte of its beginning
        path.write_bytes(path.read_bytes()[: len(lines[0]) + 1 + cut])
        export_lines(path, lines[:2])
        assert read_lines(path) == lines[:2]
    assert export_lines(path, lines) == 2
    assert export_lines(path, lines[:3]) == 0  # somebody else was further already
    assert read_lines(path) == lines
    path.write_text(path.read_text().replace('"round": 0', '"round": 1', 1))
    before = path.read_bytes()
    with pytest.raises(ResultError, match="was changed"):
        export_lines(path, lines)
    assert path.read_bytes() == before


def test_key_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "home" / "judge.key"
    with pytest.raises(ResultError, match="there is no signing key"):
        read_key(path)
    key = read_key(path, create=True)
    assert read_key(path, create=True) == key
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("abc")
    with pytest.raises(ResultError, match="is not a signing key"):
        read_key(path)
    path.write_text("ab")
    with pytest.raises(ResultError, match="64 hex digits"):
        read_key(path)
