"""Spaces, assumptions, the search and its frontier."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.errors import PlanError, RecipeError
from paceline.forecast import (
    build_forecast,
    parse_design,
    parse_space,
    read_shape,
    read_space,
    search_designs,
    search_to_json,
)
from paceline.forecast.assume import Assumption, expected_length
from paceline.report import draw_frontier
from paceline.rules import compute_score, read_rules

RULES = read_rules("emc2-2027")
SHAPE = read_shape("qwen3.8-27b")
SPACE = """
[[designs]]
family = "mtp"
num_speculative_tokens = [1, 3]

[[designs]]
family = "eagle3"
num_speculative_tokens = [3, 5]
intermediate_size = [0.5, 17408]
draft_vocab_size = [32768, 248320]

[[designs]]
family = "medusa"
num_speculative_tokens = [2, 4]

[acceptance.mtp]
first = 0.8
decay = 0.9

[acceptance.medusa]
first = 0.7
decay = 0.7

[acceptance.eagle3]
first = 0.8
decay = 1.0
size_power = 0.5

[acceptance.eagle3.factors.draft_vocab_size]
32768 = 0.9
248320 = 1.0
"""


def test_shares_and_length_by_hand() -> None:
    one = Assumption(first=0.8, decay=0.5, size_power=0.5)
    # misses 0.2 and 0.6; four times the size halves them; then a factor on both
    assert one.shares(2, size=4.0, factor=0.5) == pytest.approx([0.45, 0.35])
    assert one.shares(2, size=0.01, factor=1.0) == [0.0, 0.0]  # never below nothing
    assert expected_length([0.8, 0.5, 0.25]) == pytest.approx(1 + 0.8 + 0.4 + 0.1)


def test_a_candidate_is_the_forecast_of_its_design() -> None:
    """Search and `build_forecast` share arithmetic, not code paths: sizes are cached over K."""
    found = search_designs(parse_space(SPACE), SHAPE, RULES)
    assert len(found.candidates) == 12
    for one in found.candidates:
        lines = [
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {str(value).lower()}"
            for key, value in one.settings.items()
        ]
        full = build_forecast(parse_design("\n".join(lines), SHAPE), SHAPE, RULES)
        assert one.memory_bytes == full.memory.total_bytes
        assert one.step_ms == full.step.step_ms
        assert one.files_bytes == full.memory.sizes.files_bytes
        base = found.baseline
        score = compute_score(
            RULES,
            tau_ratio=one.acceptance_length / base.acceptance_length,
            memory_ratio=base.memory_bytes / one.memory_bytes,
            tpot_ratio=base.tpot_ms / (one.step_ms / one.acceptance_length),
        )
        assert one.score == pytest.approx(score.value)
    assert found.baseline.score == 100.0
    assert found.baseline.acceptance_length == pytest.approx(1 + 0.8 + 0.8 * 0.72 + 0.576 * 0.648)


def test_a_share_of_the_target_is_its_size() -> None:
    found = search_designs(parse_space(SPACE), SHAPE, RULES)
    sizes = {one.settings.get("intermediate_size") for one in found.candidates}
    assert sizes == {None, 17408, 8704}


def test_the_frontier_is_what_nothing_beats() -> None:
    found = search_designs(parse_space(SPACE), SHAPE, RULES)
    allowed = [one for one in found.candidates if one.allowed]
    assert found.frontier
    for one in allowed:
        beaten = any(
            other.memory_bytes <= one.memory_bytes
            and other.tpot_ms <= one.tpot_ms
            and (other.memory_bytes, other.tpot_ms) != (one.memory_bytes, one.tpot_ms)
            for other in allowed
        )
        assert beaten != (one in found.frontier)


def test_ten_thousand_designs_in_ten_seconds() -> None:
    space = read_space("default")
    assert space.num_designs >= 10_000
    begun = time.process_time()
    found = search_designs(space, read_shape("qwen3.5-4b"), RULES)
    assert time.process_time() - begun < 10
    assert len(found.candidates) == space.num_designs
    families = {one.settings["family"] for one in found.candidates}
    assert families == {"mtp", "eagle3", "medusa", "draft_model"}


def test_impossible_designs_are_counted_with_their_reason() -> None:
    text = SPACE.replace("draft_vocab_size = [32768, 248320]", "num_heads = [20, 25]")
    text = text.partition("[acceptance.eagle3.factors")[0]
    found = search_designs(parse_space(text), SHAPE, RULES)
    (reason,) = found.refused
    assert "num_heads 25 is not a multiple" in reason
    assert found.refused[reason] == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[acceptance.eagle3.factors.draft_vocab_size]", "[acceptance.ngram]", "is unknown"),
        ('family = "mtp"', 'family = "mpt"', "family is"),
        ("num_speculative_tokens = [1, 3]", "k = [1, 3]", "key 'num_speculative_tokens'"),
        ("intermediate_size = [0.5, 17408]", "intermediate_size = [1.5]", "share"),
        ("intermediate_size = [0.5, 17408]", "num_heads = [0.5]", "number with a point"),
        ("intermediate_size = [0.5, 17408]", "weights = ['bf16', 'fp8']", "what it costs"),
        ("first = 0.8\ndecay = 0.9", "first = 1.8\ndecay = 0.9", "first is 1.8"),
        ("first = 0.8\ndecay = 0.9", "first = 0.8", "key 'decay' is missing"),
        ("32768 = 0.9", "16384 = 0.9", "no factor for draft_vocab_size"),
        ("[acceptance.mtp]", "[acceptance.dflash]", "nothing is assumed"),
    ],
)
def test_a_wrong_space_gets_a_message(old: str, new: str, message: str) -> None:
    assert old in SPACE
    with pytest.raises(RecipeError, match=message):
        search_designs(parse_space(SPACE.replace(old, new, 1)), SHAPE, RULES)


def test_too_many_designs_and_no_baseline() -> None:
    wide = SPACE.replace("[3, 5]", str(list(range(1, 60_000))))
    with pytest.raises(RecipeError, match="designs; expected at most 200,000"):
        parse_space(wide)
    first, mtp = SPACE.index("[[designs]]"), "[acceptance.mtp]\nfirst = 0.8\ndecay = 0.9\n"
    alone = SPACE[SPACE.index("[[designs]]", first + 1) :].replace(mtp, "")
    with pytest.raises(PlanError, match="no baseline"):
        search_designs(parse_space(alone), SHAPE, RULES)


def test_the_plot_shows_every_point_of_the_frontier() -> None:
    record = search_to_json(search_designs(parse_space(SPACE), SHAPE, RULES))
    record["target"] = '<b>&"x'
    root = ElementTree.fromstring(draw_frontier(record))
    edge = next(e for e in root.iter() if e.get("class") == "edge")
    assert len(edge.get("points", "").split()) == len(record["frontier"])
    assert '<b>&"x' in (root.get("aria-label") or "")


def test_one_forecast_from_a_cold_start_takes_under_a_second(tmp_path: Path) -> None:
    """Processor time of the whole process, the fastest of three; a busy machine only waits."""
    (tmp_path / "d.toml").write_text('family = "eagle3"\nnum_speculative_tokens = 3\n')
    words = ["forecast", str(tmp_path / "d.toml"), "--target", "qwen3.8-27b"]
    code = (
        f"import sys; sys.argv = ['paceline', *{words!r}]\n"
        "import atexit; from paceline.cli import main\n"
        "atexit.register(lambda: print(*[m for m in ('torch', 'scipy', 'matplotlib', 'vllm')"
        " if m in sys.modules], 'loaded'))\nmain()"
    )
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "loaded"
        taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(taken) < 1.0
