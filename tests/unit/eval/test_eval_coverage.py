"""What is said of an interval's coverage is what was simulated, and a simulation small enough."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.eval.coverage import COVERAGE, state_coverage

ROOT = Path(__file__).parents[3]


def load_bench() -> Any:
    """bench/coverage.py under a name that is not another package's."""
    spec = importlib.util.spec_from_file_location("bench_coverage", ROOT / "bench" / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_stated_at_no_more_prompts_than_there_are() -> None:
    assert state_coverage("tau", 1000, 0.95) == state_coverage("tau", max_size("tau"), 0.95)
    found = state_coverage("tau", 39, 0.95)
    assert found is not None
    assert found["num_per_category"] == 25
    assert state_coverage("tau", 0, 0.95) is None
    assert state_coverage("tau", 40, 0.9) is None  # nothing was simulated at 90 %


def max_size(figure: str) -> int:
    return max(row[0] for row in COVERAGE[figure])


@pytest.mark.parametrize("figure", sorted(COVERAGE))
def test_at_40_prompts_a_category_it_is_93_to_97_percent(figure: str) -> None:
    for size, low, high in COVERAGE[figure]:
        if size >= 40:
            assert 0.93 <= low <= high <= 0.97


def test_the_table_is_the_documents() -> None:
    """docs/results/coverage.md by scenario, coverage.py the range: one block, by smallest size."""
    columns = {"tau": (3,), "geomean": (4,), "medians": (5,), "score": (6, 7)}
    found: dict[tuple[str, int], list[float]] = {}
    text = (ROOT / "docs" / "results" / "coverage.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 9 or cells[1] != "1":
            continue
        size = (
            min(int(n) for n in cells[0].split(","))
            if "," in cells[0]
            else int(cells[0].split("x")[0])
        )
        for figure, places in columns.items():
            for place in places:
                if cells[place] != "-":
                    found.setdefault((figure, size), []).append(float(cells[place]))
    table = {
        (figure, size): (low, high) for figure, rows in COVERAGE.items() for size, low, high in rows
    }
    assert table.keys() == found.keys()
    for key, shares in found.items():
        assert table[key] == pytest.approx((min(shares) / 100, max(shares) / 100), abs=6e-4)


def test_a_small_simulation_agrees() -> None:
    """Skewed worlds of ten prompts a category: far more than the percentiles' share, and 95 %."""
    found = load_bench().simulate(
        [10] * 8, "mixed", runs=120, num_blocks=1, unbalance=0.0, resamples=99
    )
    assert found["tau"] is not None
    assert found["percentile"] is not None
    assert found["tau"] > found["percentile"] + 0.03
    assert 0.88 <= found["tau"] <= 0.99
    assert 0.88 <= (found["score by medians"] or 0) <= 1.0
