"""paceline report --phase1, --phase2: joins the report's source, its forecast and a run folder."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.console import say
from paceline.errors import MissingExtraError

__all__ = ["write_phase_report"]


def write_phase_report(source: Path, out: Path, run: Path | None) -> None:
    """Writes report.json, report.html and, where Chromium is installed, report.pdf into `out`."""
    from paceline.forecast import build_phase_record, read_phase
    from paceline.records import atomic_folder, read_json, write_json
    from paceline.report import write_pdf, write_phase_page

    record = build_phase_record(read_phase(source))
    result = None
    if run is not None:
        result = read_json(
            run / "result.json", expected="a run folder, as `paceline eval --out` writes it"
        )
    missing = ""
    with atomic_folder(out) as folder:
        write_json(folder / "report.json", record)
        write_phase_page(record, folder / "report.html", result)
        try:
            write_pdf(folder / "report.html", folder / "report.pdf")
        except MissingExtraError as error:
            missing = str(error).replace(str(folder), str(out))
    say(f"report: {out / 'report.html'}")
    say(missing or f"pdf:    {out / 'report.pdf'}")
