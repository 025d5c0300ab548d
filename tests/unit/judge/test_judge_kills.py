"""kill -9 at random points of real processes; bench/judge_kills.py does the same 200 times."""

from __future__ import annotations

from pathlib import Path

from judge_kills import kill_judges


def test_ten_kills_lose_and_double_nothing(tmp_path: Path, queue_url: str | None) -> None:
    found = kill_judges(tmp_path, num_kills=10, url=queue_url, seed=11)
    assert found["num_kills"] >= 10
    assert found["num_results"] == found["num_entries"] == found["num_drafts"] >= 6
    assert (found["num_lost"], found["num_doubled"], found["num_wrong"]) == (0, 0, 0)
    assert found["ledger_file_is_whole"]
    assert found["left_over"] == []
