"""Module patterns out of a quantization_config, read by a tiny grammar and never by `re`.

    model.layers.0.mlp          a name; it stands for itself
    re:.*\\.mlp\\.(gate)_proj$  refused: groups are not in the grammar

After `re:` (or for GPTQ's `dynamic` after `-:` or `+:`) a pattern may hold letters, digits, `_`,
`-`, `\\.`, `.`, `\\d`, `[0-9]`, each of the last three with `*` or `+`, `^` first and `$` last.
Without groups nothing nests, and a match costs pattern length x name length at most.
"""

from __future__ import annotations

import re

__all__ = ["MAX_LENGTH", "MAX_PATTERNS", "Step", "matches_name", "parse_pattern"]

MAX_LENGTH = 128
MAX_PATTERNS = 256
_MAX_REPEATS = 4
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_ATOM = re.compile(
    r"(?P<any>\.)|(?P<digit>\\d|\[0-9\])|\\(?P<escaped>[.\-_])|(?P<letter>[\w\-])", re.A
)

# The character ("" for any, "\\d" for a digit), and whether it may repeat, or be left out.
Step = tuple[str, bool, bool]


def parse_pattern(text: str, *, is_regex: bool) -> tuple[Step, ...] | None:
    """The steps of one name or pattern; None when it is outside the grammar."""
    if len(text) > MAX_LENGTH:
        return None
    if not is_regex:
        return tuple((char, False, False) for char in text) if _NAME.fullmatch(text) else None
    body = text.removeprefix("^")
    ends = body.endswith("$") and not body.endswith("\\$")
    body = body[:-1] if ends else body
    if not body:  # it would match every module
        return None
    steps: list[Step] = []
    at = repeats = 0
    while at < len(body):
        atom = _ATOM.match(body, at)
        if atom is None:
            return None
        at = atom.end()
        if atom["any"]:
            char = ""
        elif atom["digit"]:
            char = "\\d"
        else:
            char = atom["escaped"] or atom["letter"]
        sign = body[at : at + 1] if body[at : at + 1] in ("*", "+") else ""
        if sign and char not in ("", "\\d"):
            return None
        at += len(sign)
        repeats += bool(sign)
        if sign == "+":
            steps.append((char, False, False))
        steps.append((char, bool(sign), bool(sign)))
    if not ends:
        steps.append(("", True, True))  # vLLM matches at the beginning, not to the end
    return tuple(steps) if repeats <= _MAX_REPEATS else None


def matches_name(steps: tuple[Step, ...], name: str) -> bool:
    """Whether the whole name is spelled by the steps: all states at once, never back."""
    states = _skip({0}, steps)
    for char in name:
        moved = set()
        for state in states:
            if state < len(steps) and _fits(steps[state][0], char):
                moved.add(state if steps[state][1] else state + 1)
        states = _skip(moved, steps)
        if not states:
            return False
    return len(steps) in states


def _fits(wanted: str, char: str) -> bool:
    return wanted == "" or wanted == char or (wanted == "\\d" and char.isdecimal())


def _skip(states: set[int], steps: tuple[Step, ...]) -> set[int]:
    """Also the states behind steps that may be left out."""
    reached = set(states)
    for state in sorted(states):
        while state < len(steps) and steps[state][2]:
            state += 1
            reached.add(state)
    return reached
