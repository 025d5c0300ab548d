"""Ranks, ties and the field, worked out by hand; and what the pages hold."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from build_field import FIELD, build_entry, write_field

from paceline.errors import ResultError
from paceline.report import read_submissions, write_leaderboard
from paceline.report.leaderboard import describe_field, rank_entries
from paceline.report.leaderboard_read import Submitted
from paceline.rules import read_rules

RULES = read_rules("emc2-2027")
DEMO = read_rules("demo")


def entry(
    name: str, value: float | None, half: float | None = 1.0, *, ranked: bool = True, **more: Any
) -> Submitted:
    score: dict[str, Any] | None = None
    if value is not None:
        low, high = (None, None) if half is None else (value - half, value + half)
        score = {"value": value, "low": low, "high": high, "ranked": ranked, "reasons": []}
    words: dict[str, Any] = {
        "team": name,
        "name": name,
        "family": "eagle3",
        "identity": name,
        "state": "measured",
        "reasons": (),
        "notes": (),
        "is_final": False,
        "result": {"score": score, "rules": {"sha256": RULES.sha256}},
        "folder": None,
        **more,
    }
    return Submitted(**words)


def rank(*entries: Submitted, noise: float | None = None) -> list[tuple[str, Any, Any, bool]]:
    rows = rank_entries(entries, rules_sha256=RULES.sha256, noise=noise)
    return [(row.entry.name, row.rank, row.rank_worst, row.is_tied) for row in rows]


def test_entries_apart_have_their_own_places() -> None:
    found = rank(entry("b", 110), entry("a", 120), entry("c", 90))
    assert found == [("a", 1, 1, False), ("b", 2, 2, False), ("c", 3, 3, False)]


def test_overlapping_intervals_share_a_place() -> None:
    # a 120 +- 1 and b 118.5 +- 1 overlap; b and c 116.6 +- 1 overlap; a and c do not
    found = rank(entry("a", 120), entry("b", 118.5), entry("c", 116.6), entry("d", 100))
    assert found == [("a", 1, 2, True), ("b", 1, 3, True), ("c", 2, 3, True), ("d", 4, 4, False)]


def test_below_the_noise_floor_is_a_tie() -> None:
    narrow = (entry("a", 120, 0.1), entry("b", 118, 0.1))
    assert rank(*narrow) == [("a", 1, 1, False), ("b", 2, 2, False)]
    assert rank(*narrow, noise=2.5) == [("a", 1, 2, True), ("b", 1, 2, True)]
    assert rank(*narrow, noise=2.0) == [("a", 1, 1, False), ("b", 2, 2, False)]


def test_equal_scores_without_intervals_tie() -> None:
    found = rank(entry("b", 100, None), entry("a", 100, None), entry("c", 99, None))
    assert found == [("a", 1, 2, True), ("b", 1, 2, True), ("c", 3, 3, False)]


def test_who_is_not_ranked_takes_no_place_and_says_why() -> None:
    rows = rank_entries(
        [
            entry("cheat", 150, reasons=("acceptance rule is not the stock one",)),
            entry("gated", 140, ranked=False),
            entry("none", None),
            entry("late", 130, state="superseded"),
            entry("bad", None, state="refused", result=None, reasons=("not acceptable",)),
            entry("a", 110),
        ],
        rules_sha256=RULES.sha256,
    )
    assert [(row.entry.name, row.rank, row.state) for row in rows] == [
        ("a", 1, "ranked"),
        ("cheat", None, "unranked"),
        ("gated", None, "unranked"),
        ("none", None, "unranked"),
        ("bad", None, "refused"),
        ("late", None, "superseded"),
    ]
    assert all(row.reasons for row in rows[1:])
    field = describe_field(rows)
    assert (field.num_entries, field.num_ranked, field.median, field.quartiles) == (6, 1, 110, None)


def test_a_run_that_the_gate_withheld_says_so() -> None:
    held = entry("forks", None)
    assert held.result is not None
    result = {**held.result, "withheld": {"candidate": ["3 of 8 answers really fork"]}}
    (row,) = rank_entries([replace(held, result=result)], rules_sha256=RULES.sha256)
    assert (row.state, row.reasons) == ("unranked", ("candidate: 3 of 8 answers really fork",))


def test_the_field_by_hand() -> None:
    rows = rank_entries([entry(str(v), v) for v in (90, 100, 110, 130)], rules_sha256=RULES.sha256)
    field = describe_field(rows)
    assert (field.median, field.quartiles, field.range) == (105, (97.5, 115), (90, 130))


def test_results_of_other_rules_are_refused() -> None:
    with pytest.raises(ResultError, match="measured under other rules"):
        rank_entries([entry("a", 100)], rules_sha256="0" * 64)


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_field(tmp_path_factory.mktemp("field") / "public", RULES)


@pytest.fixture(scope="module")
def site(field: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    write_leaderboard(read_submissions([field]), asdict(RULES), out)
    return out


def test_the_site_is_whole(site: Path) -> None:
    record = json.loads((site / "leaderboard.json").read_text())
    assert [e["rank"] for e in record["entries"]][:3] == [1, 1, 3]
    by_name = {e["name"]: e for e in record["entries"]}
    assert by_name["tailwind-eagle3-v1"]["state"] == "superseded"  # v2 is the team's final one
    assert by_name["calm"]["reasons"] == [
        "acceptance is 0.684 of the baseline's, below the gate of 0.8"
    ]
    assert by_name["no-luck"]["report"] is None
    pages = [site / name for name in ("index.html", "contest.html", "submit.html")]
    reports = [site / e["report"] for e in record["entries"] if e["report"]]
    assert len(reports) == len(FIELD) - 2
    for path in [*pages, *reports]:
        text = path.read_text(encoding="utf-8")
        assert "alert(1)</script>" not in text
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)  # nothing from elsewhere
        for target in re.findall(r'href="([^"#:]+)"', text):
            assert (path.parent / target).is_file(), target


def test_the_same_input_gives_the_same_bytes(field: Path, site: Path, tmp_path: Path) -> None:
    write_leaderboard(read_submissions([field]), asdict(RULES), tmp_path / "again")
    for path in site.rglob("*.*"):
        assert (tmp_path / "again" / path.relative_to(site)).read_bytes() == path.read_bytes()


def test_the_contest_pages_say_what_the_rules_say(site: Path) -> None:
    contest = (site / "contest.html").read_text(encoding="utf-8")
    submit = (site / "submit.html").read_text(encoding="utf-8")
    for words in ("1,500,000,000", "3 GB", "16,384 tokens", "February 2027", "Qwen3.8-27B", "50 %"):
        assert words in contest
    assert contest.count('class="tag"') == contest.count("provisional</span>") > 8
    assert "owner/name@commit" in submit
    assert "5 drafts" in submit
    assert RULES.contest is not None
    for line in RULES.contest.not_allowed:
        assert line in contest
        assert line in submit


def test_rules_of_no_contest_have_pages_too(tmp_path: Path) -> None:
    result = build_entry(DEMO, name="one", skill=0.6, seed=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    rows = write_leaderboard(read_submissions([tmp_path / "run"]), asdict(DEMO), tmp_path / "site")
    assert [(row.rank, row.entry.name) for row in rows] == [(1, "one")]
    assert "name no dates" in (tmp_path / "site" / "contest.html").read_text()
    write_leaderboard(read_submissions([tmp_path]), asdict(DEMO), tmp_path / "site")  # replaced


def test_what_is_no_result_is_named(tmp_path: Path, field: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "empty", "holds no result"),
        (tmp_path / "nowhere", "there is no such folder"),
    ):
        with pytest.raises(ResultError, match=words):
            read_submissions([path])
    with pytest.raises(ResultError, match="is there twice"):
        read_submissions([field, field])
    with pytest.raises(ResultError, match="holds something else"):
        write_leaderboard(read_submissions([field]), asdict(RULES), field)
    assert (field / "results.jsonl").exists()


def test_nothing_ranked_is_a_page_too(tmp_path: Path) -> None:
    write_leaderboard([entry("a", 100, ranked=False, result=None, state="failed")],
                      asdict(RULES), tmp_path / "site")  # fmt: skip
    assert "not measured" in (tmp_path / "site" / "index.html").read_text()
