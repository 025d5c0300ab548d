"""Keeps the words of hidden prompts out of everything that is written or printed.

A text is withheld word by word: words that a hidden prompt has and public prompts do not, and any
four words in a row that a hidden prompt has, however common. The words of this package's own code
count as public, so that its messages stay readable. Long runs of numbers (token ids) and
escaped letters, which would hide words from this, are withheld too.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TextIO

import paceline
from paceline.errors import PacelineError

__all__ = ["WITHHELD", "Screen", "build_screen", "screen_error", "screen_text", "screened_output"]

WITHHELD = "[withheld]"
_RUN = 4
# scripts written without spaces: every sign is a word
_WORD = re.compile(r"[\u2e80-\U0010ffff]|[^\W\u2e80-\U0010ffff]+")
_OPAQUE = re.compile(r"(?:\\[ux][0-9a-fA-F]{2,4})+|\d+(?:[\s,;]+\d+){7,}")
_MAX_TEXT = 600


@dataclass(frozen=True, kw_only=True)
class Screen:
    """words: lower case, that only hidden prompts have. runs: words in a row of hidden prompts."""

    words: frozenset[str]
    runs: frozenset[tuple[str, ...]]


def build_screen(hidden: Iterable[str], public: Iterable[str] = ()) -> Screen:
    """hidden: texts of hidden prompts (and their ids). public: texts that anybody may know."""
    words: set[str] = set()
    runs: set[tuple[str, ...]] = set()
    for text in hidden:
        own = _WORD.findall(text.lower())
        # a short number alone tells nothing, and withheld it would spoil every message
        words.update(word for word in own if len(word) > 4 or not word.isdecimal())
        length = min(_RUN, len(own))
        if length > 1:
            runs.update(tuple(own[i : i + length]) for i in range(len(own) - length + 1))
    package = Path(paceline.__file__).parent
    own_code = (file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py")))
    for text in chain(public, own_code):
        words.difference_update(_WORD.findall(text.lower()))
    return Screen(words=frozenset(words), runs=frozenset(runs))


def screen_text(screen: Screen, text: str) -> str:
    """The text on one line with hidden words replaced by WITHHELD; at most 600 characters."""
    text = _OPAQUE.sub(f" {WITHHELD} ", text)
    found = list(_WORD.finditer(text))
    lowered = [match[0].lower() for match in found]
    masked = [word in screen.words for word in lowered]
    for length in {len(run) for run in screen.runs}:
        for i in range(len(lowered) - length + 1):
            if tuple(lowered[i : i + length]) in screen.runs:
                masked[i : i + length] = [True] * length
    parts, end, was_masked = [], 0, False
    for match, is_masked in zip(found, masked, strict=True):
        if not (is_masked and was_masked):
            parts.append(text[end : match.start()])
            parts.append(WITHHELD if is_masked else match[0])
        end, was_masked = match.end(), is_masked
    line = " ".join("".join([*parts, text[end:]]).split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def screen_error(screen: Screen, error: BaseException) -> str:
    """What may be said of a failure: an error of ours screened, of any other only its kind."""
    if isinstance(error, PacelineError):
        return screen_text(screen, str(error))
    return f"internal fault ({type(error).__name__})"


@contextlib.contextmanager
def screened_output(screen: Screen) -> Iterator[None]:
    """Whatever the block prints reaches standard output line by line, indented and screened.

    Held below Python: libraries' own handles, C code and child processes are screened too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    kept = {number: os.dup(number) for number in (1, 2)}
    before = sys.stdout, sys.stderr
    # a test's or a notebook's stream is no descriptor: it is written to as it is
    out = before[0] if not _is_descriptor(before[0]) else os.fdopen(os.dup(1), "w")
    stop = threading.Event()
    thread = threading.Thread(
        target=_pass_lines, args=(screen, reader, out, stop), name="screen", daemon=True
    )
    thread.start()
    printed = os.fdopen(os.dup(writer), "w", buffering=1)
    try:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.stdout = sys.stderr = printed
        yield
    finally:
        printed.flush()
        sys.stdout, sys.stderr = before
        for number, handle in kept.items():
            os.dup2(handle, number)
            os.close(handle)
        printed.close()
        os.close(writer)
        stop.set()
        thread.join()
        os.close(reader)
        if out is not before[0]:
            out.close()


def _is_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):
        return False


def _pass_lines(screen: Screen, reader: int, out: TextIO, stop: threading.Event) -> None:
    """Blank lines are left out. Ends when told to and nothing is left: a child may stay longer."""
    held = b""
    while True:
        ready = select.select([reader], [], [], 0.05)[0]
        data = os.read(reader, 1 << 16) if ready else b""
        if not data and stop.is_set():
            break
        *lines, held = (held + data).split(b"\n")
        _print_lines(screen, lines, out)
    _print_lines(screen, [held], out)


def _print_lines(screen: Screen, lines: list[bytes], out: TextIO) -> None:
    for line in lines:
        if text := line.decode("utf-8", "replace").strip():
            print(f"  {screen_text(screen, text)}", file=out, flush=True)
