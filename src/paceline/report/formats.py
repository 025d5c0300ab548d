"""How a number or a stranger's text is written. A missing number is "not measured"."""

from __future__ import annotations

import unicodedata

__all__ = [
    "NOT_MEASURED",
    "clean_text",
    "format_bytes",
    "format_count",
    "format_interval",
    "format_ms",
    "format_number",
    "format_share",
    "format_token",
]

NOT_MEASURED = "not measured"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_MAX_MARKS = 3  # combining marks on one letter before the rest is dropped


def format_number(value: float | None, digits: int = 3) -> str:
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}"


def format_count(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.0f}"


def format_share(value: float | None) -> str:
    """0.612 -> "61.2 %"."""
    return NOT_MEASURED if value is None else f"{value * 100:.1f} %"


def format_ms(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.2f} ms"


def format_interval(low: float | None, high: float | None, digits: int = 3) -> str:
    if low is None or high is None:
        return NOT_MEASURED
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def format_bytes(value: float | None) -> str:
    """Binary units, three to five significant digits: 222298112 -> "212.0 MiB"."""
    if value is None:
        return NOT_MEASURED
    size, unit = value, 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.0f} bytes" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def clean_text(text: object, *, limit: int = 400) -> str:
    """A stranger's text on one line: control, bidi and invisible characters become [U+XXXX]."""
    parts: list[str] = []
    marks = 0
    source = str(text)
    for letter in source[:limit]:
        category = unicodedata.category(letter)
        marks = marks + 1 if category in {"Mn", "Me"} else 0
        if marks > _MAX_MARKS:
            continue
        if letter in "\t\n\r":
            parts.append(" ")
        elif category in _HIDDEN:
            parts.append(f"[U+{ord(letter):04X}]")
        else:
            parts.append(letter)
    return "".join(parts) + ("..." if len(source) > limit else "")


def format_token(text: object) -> str:
    """One token's text with line breaks made visible; at most 200 characters."""
    source = str(text).replace("\r\n", "\n").replace("\t", "→")
    return "↵".join(clean_text(part, limit=200) for part in source.split("\n")[:50])
