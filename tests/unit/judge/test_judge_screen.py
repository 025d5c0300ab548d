"""What is withheld of a text, and what stays readable."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from paceline.errors import EngineError
from paceline.judge import build_screen, screen_error, screen_text, screened_output
from paceline.judge.screen import WITHHELD

HIDDEN = (
    "Why do zebrafish regrow fins but people do not?",
    "What is the time and what is the date",
    "为什么斑马鱼可以再生",
    "Short zq9",
)
PUBLIC = (
    "why do people not do what is the time or the date and when but short fins memory of engine",
)
SCREEN = build_screen(HIDDEN, PUBLIC)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("CUDA out of memory at 12 GiB", "CUDA out of memory at 12 GiB"),
        ("died on 'zebrafish'", f"died on '{WITHHELD}'"),
        ("ZEBRAFISH, regrow", WITHHELD),
        ("tell me what is the time now", f"tell me {WITHHELD} now"),
        ("what is not the time", "what is not the time"),
        ("x 斑马 y", f"x {WITHHELD} y"),
        ("Short zq9!", f"{WITHHELD}!"),
        ("a short engine", "a short engine"),
        ("ids [1, 22, 333, 4, 5, 6, 7, 8, 9]", f"ids [ {WITHHELD} ]"),
        ("counts 1, 2, 3", "counts 1, 2, 3"),
        (r"b'\xe6\x96\x91 \u6591'", f"b' {WITHHELD} {WITHHELD} '"),
        ("line\none\ttwo", "line one two"),
    ],
)
def test_words(text: str, shown: str) -> None:
    assert screen_text(SCREEN, text) == shown


def test_own_messages_stay_readable() -> None:
    screen = build_screen(["The engine reads the acceptance length of every baseline draft"])
    text = "'candidate' failed on 3.1% of the prompts; ratio_of_medians; near_tie"
    assert screen_text(screen, text) == text


def test_errors_of_ours_are_screened_others_are_named_only() -> None:
    ours = EngineError("died on zebrafish", where="engine.log: regrow", fix="Look at fins.")
    assert (
        screen_error(SCREEN, ours) == f"engine.log: {WITHHELD}: died on {WITHHELD}. Look at fins."
    )
    assert screen_error(SCREEN, RuntimeError("zebrafish")) == "internal fault (RuntimeError)"


def print_in_every_way() -> None:
    from paceline.cli.console import say

    with screened_output(SCREEN):
        handler = logging.StreamHandler(sys.__stderr__)  # a handle from before
        print("starting zebra", end="")
        print("fish now\n\nsecond")
        say("asking about zebrafish")  # as the commands print
        print("on regrow", file=sys.stderr)
        handler.emit(logging.LogRecord("x", 40, "", 0, "log of zebrafish", None, None))
        subprocess.run([sys.executable, "-c", "print('child: zebrafish')"], check=True)
        print("no end of zebrafish", end="")
    print("after")


SHOWN = f"""  starting {WITHHELD} now
  second
  asking about {WITHHELD}
  on {WITHHELD}
  log of {WITHHELD}
  child: {WITHHELD}
  no end of {WITHHELD}
after
"""


def test_what_is_printed_is_screened_once_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    print_in_every_way()
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == (SHOWN, "")


def test_an_error_leaves_the_streams_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with screened_output(SCREEN):
            print("zebrafish")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    print("out")
    print("err", file=sys.stderr)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == (f"  {WITHHELD}\nout\n", "err\n")


def test_a_stream_that_is_no_descriptor_is_screened_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with screened_output(SCREEN):
        print("about zebrafish")
    assert capsys.readouterr().out == f"  about {WITHHELD}\n"


def test_long_texts_are_cut() -> None:
    assert len(screen_text(SCREEN, "word " * 1000)) == 600
