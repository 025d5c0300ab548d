"""paceline quality without an engine: mistakes are told before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from command_line import Outcome

Run = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--task", "gsm8k"), "no gate 'gsm8k'"),
        (("--task", "ifeval", "--task", "ifeval"), "a task is named twice"),
        (("--questions", "nowhere"), "no such folder of questions"),
        (("--rules", "emc2-2027"), "no quality gates"),
        (("--url", "http://a", "--draft", "ngram"), "have no effect on a running server"),
        (("--url", "http://a", "--k", "3"), "have no effect on a running server"),
        (("--plain", "smollm2", "--plain-url", "http://a"), "are both given"),
        (("--url", "localhost:1", "--questions", "bundled"), "is no server's address"),
        (("--url", "http://127.0.0.1:9", "--questions", "bundled"), "cannot be reached"),
    ],
)
def test_mistakes_are_told(run: Run, words: tuple[str, ...], expected: str) -> None:
    done = run("quality", "smollm2", "--out", "q.json", *words)
    assert done.code in (2, 4)
    done.require(done.code, expected)
