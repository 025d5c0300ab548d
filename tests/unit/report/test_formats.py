from __future__ import annotations

import pytest

from paceline.report.formats import (
    clean_text,
    format_bytes,
    format_interval,
    format_ms,
    format_number,
    format_share,
    format_token,
)
from paceline.report.plots import _ticks


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (222_298_112, "212.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (None, "not measured"),
    ],
)
def test_bytes_are_binary(size: float | None, text: str) -> None:
    assert format_bytes(size) == text


def test_missing_numbers_are_not_measured() -> None:
    assert format_number(None) == format_share(None) == format_ms(None) == "not measured"
    assert format_interval(1.0, None) == "not measured"
    assert format_number(0.0) == "0.000"
    assert format_share(0.612) == "61.2 %"
    assert format_interval(1.15, 1.28, 2) == "1.15 to 1.28"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        ("a\u202eb", "a[U+202E]b"),
        ("a\u200bb\ufeff", "a[U+200B]b[U+FEFF]"),
        ("\x1b[31m", "[U+001B][31m"),
        ("two\nlines\tand", "two lines and"),
        ("\ud83d", "[U+D83D]"),
        ("héllo שלום 你好", "héllo שלום 你好"),
        ("e" + "\u0301" * 50, "e" + "\u0301" * 3),
        ("x" * 500, "x" * 400 + "..."),
    ],
)
def test_a_strangers_text_is_made_visible(raw: str, shown: str) -> None:
    assert clean_text(raw) == shown


def test_tokens_show_their_line_breaks() -> None:
    assert format_token(" a\n\nb\tc") == " a↵↵b→c"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 2.55), (10, 29.6), (0.9, 0.9), (0, 3e-7)])
def test_axis_ticks_cover_the_values(low: float, high: float) -> None:
    ticks = _ticks(low, high)
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9
    assert 2 <= len(ticks) <= 8
