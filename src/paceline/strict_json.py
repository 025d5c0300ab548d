"""JSON from strangers: bounded before it is parsed, and stricter than Python's own reader.

Refused: anything but UTF-8, a byte-order mark, NUL, lone surrogates, duplicate keys at any depth,
NaN, Infinity, numbers that a double or a 53-bit integer cannot hold, deep or huge documents.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from paceline.problems import Problem, show_value

__all__ = ["JsonLimits", "scan_json"]

_MAX_INT = 2**53
_MAX_PROBLEMS = 20
# Strings run to their closing quote, or to the end of the text: one pass, never quadratic.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]|,', re.DOTALL)
_FIX = "Write the file again with a standard JSON writer."


@dataclass(frozen=True, kw_only=True)
class JsonLimits:
    """Bounds on one document. Sizes in bytes of UTF-8; string length in characters as written."""

    max_bytes: int = 256 * 1024
    max_depth: int = 16
    max_nodes: int = 20_000
    max_string: int = 4096


class _Scan:
    """Collects problems while json.loads calls the hooks."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []

    def add(self, rule: str, message: str, *, where: str = "", expected: str = "") -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(
                Problem(
                    rule=rule,
                    file=self.file,
                    where=where,
                    expected=expected or "strict JSON",
                    message=message,
                    fix=_FIX,
                )
            )

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                _tell_twice(key, self)
            result[key] = value
        return result

    def constant(self, name: str) -> None:
        _tell_number(f"{name} is not JSON", "finite numbers", self)

    def integer(self, text: str) -> int:
        if len(text) > 17 or abs(int(text)) > _MAX_INT:
            shown = show_value(text, limit=40)
            _tell_number(f"integer {shown} is too large", "integers up to 2**53", self)
            return 0
        return int(text)

    def float(self, text: str) -> float:
        if len(text) > 64:
            _tell_number(f"number {show_value(text, limit=40)} is too long", "", self)
            return 0.0
        value = float(text)
        written_as_zero = not any(digit in "123456789" for digit in re.split("[eE]", text)[0])
        if not math.isfinite(value) or (value == 0.0 and not written_as_zero):
            shown = show_value(text, limit=40)
            _tell_number(f"number {shown} does not fit a double", "finite numbers", self)
            return 0.0
        return value


def _tell_twice(key: str, scan: _Scan) -> None:
    """`json.dup`."""
    name = show_value(key)
    message = f"key '{name}' appears twice in one object"
    scan.add("json.dup", message, where=name, expected="each key once")


def _tell_number(message: str, expected: str, scan: _Scan) -> None:
    """`json.const`."""
    scan.add("json.const", message, expected=expected)


def _decode(data: bytes, scan: _Scan) -> str | None:
    """`json.utf8`: the text; None for bytes that readers take for different ones."""
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError as problem:
        scan.add("json.utf8", f"not UTF-8 (byte {problem.start})", expected="UTF-8 text")
        return None
    if text.startswith("\ufeff"):
        scan.add("json.utf8", "starts with a byte-order mark", expected="UTF-8 without a mark")
        return None
    if "\0" in text:
        scan.add("json.utf8", "holds a NUL byte", expected="UTF-8 text")
        return None
    return text


def _parse(text: str, scan: _Scan) -> Any:
    """`json.syntax`: the value, None where there is none."""
    try:
        return json.loads(
            text,
            object_pairs_hook=scan.pairs,
            parse_constant=scan.constant,
            parse_int=scan.integer,
            parse_float=scan.float,
        )
    except RecursionError:
        scan.add("json.depth", "the JSON is nested too deeply")
    except ValueError as problem:
        scan.add("json.syntax", f"not valid JSON: {show_value(str(problem))}")
    return None


def _check_bounds(text: str, limits: JsonLimits, scan: _Scan) -> None:
    """Depth, node count and string length, counted on the text before any object is built."""
    depth = deepest = nodes = longest = 0
    for match in _TOKEN.finditer(text):
        first = text[match.start()]
        if first == '"':
            longest = max(longest, match.end() - match.start() - 2)
        elif first in "[{":
            nodes += 1
            depth += 1
            deepest = max(deepest, depth)
        elif first == ",":
            nodes += 1
        else:
            depth -= 1
        if deepest > limits.max_depth or nodes > limits.max_nodes:
            break  # already refused: the rest of a bomb is not worth the time
    for what, found, allowed in (
        ("nested too deeply", deepest, limits.max_depth),
        ("too large: too many values", nodes, limits.max_nodes),
        ("holding a string that is too long", longest, limits.max_string),
    ):
        if found > allowed:
            scan.add(
                "json.depth",
                f"the JSON is {what} ({found:,} or more)",
                expected=f"at most {allowed:,}",
            )


def _has_surrogate(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if any(0xD800 <= ord(char) <= 0xDFFF for char in item):
                return True
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return False


def scan_json(
    data: bytes, *, file: str, limits: JsonLimits | None = None
) -> tuple[Any | None, list[Problem]]:
    """Parses strictly; returns (value, problems). The value is None when nothing could be parsed.

    A value can come with problems (duplicate keys: the last one is kept), so that later checks
    still run; a caller that needs a sound document refuses any problem. Never raises.
    """
    limits = limits or JsonLimits()
    scan = _Scan(file)
    if len(data) > limits.max_bytes:
        scan.add(
            "json.depth",
            f"the JSON is too large ({len(data):,} bytes)",
            expected=f"at most {limits.max_bytes:,} bytes",
        )
        return None, scan.problems
    text = _decode(data, scan)
    if text is None:
        return None, scan.problems
    _check_bounds(text, limits, scan)
    if scan.problems:
        return None, scan.problems
    value = _parse(text, scan)
    if value is None:
        return None, scan.problems
    if "\\u" in text and _has_surrogate(value):
        scan.add("json.utf8", "holds half of a surrogate pair", expected="valid Unicode")
        return None, scan.problems
    return value, scan.problems
