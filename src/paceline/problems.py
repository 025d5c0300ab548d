"""One defect found in an untrusted file, and how untrusted text is made safe to print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError

__all__ = ["Problem", "keep_worst", "require_none", "show_text", "show_value", "without_notes"]

_MAX_SHOWN = 120
_MAX_TEXT = 600


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with one file.

    rule: id from the rule table ("st.shape"). file: name inside the folder. where: key, JSON path
    or tensor ("" when it is the file itself). found / expected: short values. message: a full
    clause a stranger understands. fix: what the author can do.
    """

    rule: str
    file: str
    where: str = ""
    found: str = ""
    expected: str = ""
    message: str
    fix: str = ""


def show_value(value: Any, *, limit: int = _MAX_SHOWN) -> str:
    """One printable line for any value out of an untrusted file: escapes controls, cuts length.

    Strings, and names of files or tensors, come back without quotes when they are plain text.
    """
    if isinstance(value, str):
        text = value[: limit + 1]
        if not text.isprintable():
            text = text.encode("unicode_escape", "backslashreplace").decode("ascii")
    elif isinstance(value, (list, tuple, dict)):
        text = _show_container(value, limit)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, int) and value.bit_length() > 256:
        text = "a number of more than 256 bits"
    elif value is None:
        text = "null"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def show_text(text: str) -> str:
    """A whole message made safe to print, whatever names of a stranger's it quotes."""
    if text.isprintable() and len(text) <= _MAX_TEXT:
        return text
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode()
        for char in text[: _MAX_TEXT + 1]
    )
    return shown if len(shown) <= _MAX_TEXT else shown[: _MAX_TEXT - 1] + "…"


def _show_container(value: list[Any] | tuple[Any, ...] | dict[Any, Any], limit: int) -> str:
    """Shows the first few items; a nested container only as its size."""
    if isinstance(value, dict):
        items = [f"{show_value(key, limit=40)}: {_brief(value[key])}" for key in list(value)[:12]]
        left, right = "{", "}"
    else:
        items = [_brief(item) for item in value[:12]]
        left, right = "[", "]"
    if len(value) > 12:
        items.append("…")
    return show_value(left + ", ".join(items) + right, limit=limit)


def _brief(value: Any) -> str:
    if isinstance(value, (list, tuple, dict)) and value:
        return f"({len(value)} items)"
    return show_value(value, limit=40)


def without_notes(problems: list[Problem]) -> list[Problem]:
    """The problems that refuse a folder: all but those of a setting or tensor without effect, or of
    a default that vLLM takes for what is not stated."""
    return [
        problem
        for problem in problems
        if not problem.rule.endswith(".unread") and problem.rule != "cfg.default"
    ]


def keep_worst(problems: list[Problem], limit: int) -> list[Problem]:
    """At most `limit` of them, each that refuses a folder before each that only tells: no flood of
    the latter hides one of the former."""
    if len(problems) <= limit:
        return problems
    refusing = {id(problem) for problem in without_notes(problems)}
    return sorted(problems, key=lambda problem: id(problem) not in refusing)[:limit]


def require_none(problems: list[Problem], error: type[PacelineError], *, folder: str = "") -> None:
    """Raises `error` for the first problem; the others are counted in its text."""
    if not problems:
        return
    first = problems[0]
    place = f"{folder.rstrip('/')}/{first.file}" if folder else first.file
    more = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
    raise error(
        f"{show_text(first.message)}{more}",
        where=show_text(f"{place}: {first.where}" if first.where else place),
        expected=show_text(first.expected),
        fix=first.fix,
    )
