"""bench/mixture_replay.py walks answers as a server would: figures by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def replay() -> Any:
    path = Path(__file__).parents[3] / "bench" / "mixture_replay.py"
    spec = importlib.util.spec_from_file_location("mixture_replay", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mixture_replay"] = module
    spec.loader.exec_module(module)
    return module


def build_text(replay: Any) -> Any:
    """Eight tokens; steps may begin after 1 to 7 of them."""
    return replay.Text(
        id="a",
        category="chat",
        num_tokens=8,
        draft=[1, 0, 2, 0, 3, 1, 0],
        suffix=[0, 3, 0, 0, 0, 2, 1],
        length=[1, 4, 2, 2, 0, 5, 9],
        share=[1.0, 0.9, 0.4, 1.0, 0.0, 1.0, 1.0],
    )


def test_walks_by_hand(replay: Any) -> None:
    text = build_text(replay)
    # places 1 -> 3 -> 6 -> 8: accepted 1, 2, 1
    alone = replay.walk(text, replay.draft_alone)
    assert (alone["delivered"], alone["steps"], alone["by_suffix"]) == (7, 3, 0)
    # 1 -> 2 -> 6 -> 9, past the end: accepted 0, 3, 2
    assert replay.walk(text, replay.suffix_alone)["steps"] == 3
    # at 1 the draft (1 over 0) -> 3, the draft (2 over 0) -> 6, suffix (2 over 1) -> 9
    better = replay.walk(text, replay.better)
    assert (better["steps"], better["by_suffix"]) == (3, 1)
    # m = 4, s = 0.9: the draft at 1 -> 3, the draft at 3 -> 6, suffix at 6
    ruled = replay.walk(text, replay.rule(4, 0.9))
    assert (ruled["steps"], ruled["by_suffix"]) == (3, 1)
    # m = 1: suffix at 1 -> 2, suffix at 2 -> 6, suffix at 6 -> 9
    assert replay.walk(text, replay.rule(1, 0.5))["by_suffix"] == 3
    assert replay.tau([alone, better]) == pytest.approx(14 / 6)


def test_suffix_is_replayed_with_the_votes_that_it_takes(replay: Any) -> None:
    row = {"id": "a", "category": "chat", "prompt_ids": [5, 6, 7, 8], "output_ids": [5, 6, 7, 9]}
    (text,) = replay.replay_suffix([row], [[0, 0, 0]], 3, False)
    # after 5: 6 7 8 is drafted, 6 7 is right; after 5 6: 7 8 5, one right; after 5 6 7: 8, wrong
    assert text.suffix == [2, 1, 0]
    assert text.length == [1, 2, 3]
    assert text.share == [1.0, 1.0, 1.0]
    cold, warm = replay.replay_suffix([row, {**row, "id": "b"}], [[0] * 3, [0] * 3], 3, True)
    assert cold.suffix == [2, 1, 0]
    assert warm.suffix[2] == 0  # the prompt's own 8, two tokens longer, outvotes the answer's 9
    assert warm.share[2] == pytest.approx(9 / 10)
