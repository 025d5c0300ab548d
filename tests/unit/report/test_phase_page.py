"""A team's report: source, figures, page, phase 2 and the PDF."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from build_result import build_result

from paceline.cli.phase_report import write_phase_report
from paceline.errors import MissingExtraError, PacelineError, RecipeError, ResultError
from paceline.forecast import build_phase_record, read_phase
from paceline.report import build_phase_page, write_pdf
from paceline.report.pdf import find_chromium

SOURCE = Path(__file__).parents[3] / "recipes" / "forecast" / "report" / "report.toml"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return build_phase_record(read_phase(SOURCE))


def _copy(folder: Path, *changes: tuple[str, str]) -> Path:
    for file in SOURCE.parent.iterdir():
        text = file.read_text()
        for old, new in changes if file == SOURCE else ():
            assert old in text
            text = text.replace(old, new, 1)
        (folder / file.name).write_text(text)
    return folder / SOURCE.name


def test_scores_are_the_three_terms_at_the_three_acceptances(record: dict[str, Any]) -> None:
    forecast = record["forecast"]
    for name in ("low", "expected", "high"):
        tau = record["acceptance"][name] / 2.8
        by_hand = 50 * tau + 25 * min(forecast["memory_ratio"], 2)
        by_hand += 25 * min(tau * forecast["step_ratio"], 2)
        assert record["score"][name] == pytest.approx(by_hand)
    assert sum(term["points"] for term in record["terms"]) == pytest.approx(
        record["score"]["expected"]
    )
    assert [length for length, _ in record["curve"]][:: len(record["curve"]) - 1] == [1.0, 4.0]
    assert record["alternatives"][0]["score"] == pytest.approx(record["score"]["expected"])


def test_the_page_says_what_is_a_forecast(record: dict[str, Any]) -> None:
    page = build_phase_page(record)
    for text in ("Phase 1 report", "Score, forecast", "roofline", "an assumption", "Risks"):
        assert text in page
    assert "measured (95 %)" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_strangers_text_is_text(tmp_path: Path) -> None:
    path = _copy(tmp_path, ('team = "Example team"', 'team = "<script>alert(1)</script>"'))
    page = build_phase_page(build_phase_record(read_phase(path)))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_phase_2_puts_measured_figures_beside_the_forecast(record: dict[str, Any]) -> None:
    result, _ = build_result()
    result["rules"]["name"] = "emc2-2027"
    page = build_phase_page(record, result)
    score = result["score"]
    assert "Phase 2 report" in page
    assert "Draft memory M, measured" in page
    assert "Score, measured" in page
    assert f"{score['value']:.1f} ({score['low']:.1f} to {score['high']:.1f})" in page
    off = record["score"]["expected"] / score["value"] - 1
    assert f"{off:+.1%}" in page
    assert "The run" in page  # its target is another than the report's: said, not hidden
    bare = copy.deepcopy(result)
    bare["score"] = None
    assert "not measured" in build_phase_page(record, bare)
    with pytest.raises(ResultError):
        build_phase_page({**record, "format": "x"})


def test_both_phases_are_written_with_their_pdf(tmp_path: Path) -> None:
    if find_chromium() is None:
        pytest.skip("no Chromium is installed; apt install chromium")
    write_phase_report(SOURCE, tmp_path / "out", None)
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["report.html", "report.json", "report.pdf"]
    pdf = (tmp_path / "out" / "report.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type /Page/") > 1


def test_without_chromium_the_page_is_there_and_the_pdf_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match="apt install chromium"):
        write_pdf(tmp_path / "a.html", tmp_path / "a.pdf")
    write_phase_report(SOURCE, tmp_path / "out", None)
    assert (tmp_path / "out" / "report.html").exists()
    assert "Chromium is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "One', 'titel = "One', "'titel' is unknown"),
        ("high = 3.0", "high = 5.0", "up to 4, K . 1"),
        ("low = 2.4", "low = 2.9", "do not ascend"),
        ("low = 2.4\n", "", "has keys"),
        ('risk = "Served', 'danger = "Served', "risks 1"),
        ('design = "two-layers.toml"', 'design = "none.toml"', "none.toml"),
        ('target = "qwen3.8-27b"', 'target = "qwen9"', "no such target"),
        ("baseline_acceptance = 2.8", "baseline_acceptance = 0.5", "acceptance length from 1"),
    ],
)
def test_a_wrong_source_gets_a_message(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = _copy(tmp_path, (old, new))
    with pytest.raises(PacelineError, match=message):
        build_phase_record(read_phase(path))


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        read_phase(tmp_path / "none.toml")


def test_a_run_of_another_contest_is_refused(record: dict[str, Any]) -> None:
    result, _ = build_result()
    result["rules"]["name"] = "other"
    with pytest.raises(ResultError, match="scored by other"):
        build_phase_page(record, result)
