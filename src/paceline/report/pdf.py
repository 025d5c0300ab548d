"""A page as PDF, printed by a headless Chromium where one is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from paceline.errors import MissingExtraError, StorageError

__all__ = ["find_chromium", "write_pdf"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the page is our own and runs no script
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--no-pdf-header-footer",
)
_TIMEOUT_S = 120.0


def find_chromium() -> str | None:
    """The browser's program, or None."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def write_pdf(page: Path, pdf: Path) -> None:
    """Prints an HTML file. Raises MissingExtraError without a Chromium, StorageError where it
    printed nothing."""
    program = find_chromium()
    if program is None:
        raise MissingExtraError(
            "no PDF was made: Chromium is not installed",
            where=str(pdf),
            fix=f"Install it (apt install chromium), or print {page} from any browser.",
        )
    with tempfile.TemporaryDirectory(prefix="paceline-pdf-") as profile:
        process = subprocess.Popen(
            [
                program,
                *_FLAGS,
                f"--user-data-dir={profile}",
                f"--print-to-pdf={pdf.resolve()}",
                page.resolve().as_uri(),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not pdf.exists() or not pdf.read_bytes().startswith(b"%PDF"):
        raise StorageError(
            f"{program} printed no PDF",
            where=str(pdf),
            fix=f"Print {page} from a browser.",
        )
