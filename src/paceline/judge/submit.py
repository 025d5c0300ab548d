"""One submission: fetch, copy under a hash, look at it, and put it into the queue."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import DraftError
from paceline.judge.home import Home
from paceline.judge.ledger import build_line, export_lines, read_key
from paceline.judge.queue import Entry, add_entry, read_ledger
from paceline.judge.staging import Staged, stage_folder
from paceline.judge.tables import Queue
from paceline.rules import Rules
from paceline.validate import validate_draft

__all__ = ["submit_draft"]

_TEAM = re.compile(r"[^\W_](?:[\w .+-]{0,62}[\w.+-])?")


def submit_draft(
    source: str,
    *,
    team: str,
    home: Home,
    queue: Queue,
    rules: Rules,
    fetch: Callable[[str], Path],
    is_final: bool = False,
) -> tuple[Entry, bool]:
    """(entry, whether it is new). Run again after a kill, it ends what it had begun.

    fetch: a folder, bundled name or owner/name@commit -> a folder here. A draft that cannot be
    accepted is refused at once and uses nothing of the team's quota. Raises DraftError.
    """
    if not _TEAM.fullmatch(team):
        raise DraftError(
            f"'{team[:80]}' is not a team name",
            where="--team",
            expected="up to 64 letters, digits, spaces, . + - _, beginning with a letter or digit",
        )
    staged = stage_folder(fetch(source), home.drafts_dir, max_bytes=rules.limits.max_files_bytes)
    _require_acceptable(staged, source, rules)
    key = read_key(home.key_path, create=True)
    body = {
        "kind": "final",
        "team": team,
        "content_sha256": staged.content_sha256,
        "round": 0,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    entry, is_new = add_entry(
        queue,
        staged,
        team=team,
        source=_describe_source(source),
        max_entries=rules.contest.max_entries_per_team if rules.contest else None,
        build_final_line=(lambda seq, before: build_line(key, body, seq=seq, before=before))
        if is_final
        else None,
    )
    export_lines(home.ledger_path, read_ledger(queue))
    return entry, is_new


def _require_acceptable(staged: Staged, source: str, rules: Rules) -> None:
    report = validate_draft(staged.path, limits=rules.limits)
    if report.verdict == "fail":
        broken = [item for item in report.findings if item.severity == "error"]
        first = broken[0]
        more = f" ({len(broken) - 1} more errors)" if len(broken) > 1 else ""
        raise DraftError(
            f"{first.message}{more}",
            where=f"{source}: {first.file}" if first.file else source,
            expected=first.expected,
            fix=f"`paceline validate {source} --rules {rules.name}` lists all of them.",
        )


def _describe_source(source: str) -> str:
    """A name on the Hub as it is; of a folder here only its name, for the ledger is public."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source
