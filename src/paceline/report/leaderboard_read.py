"""Result files -> entries of a leaderboard: run folders, or the public folder of a judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import ResultError
from paceline.records import read_json, read_jsonl, sha256_file
from paceline.report.fields import pick_list, pick_text, require_format
from paceline.report.formats import clean_text
from paceline.report.score_view import name_draft

__all__ = ["Submitted", "read_submissions"]

_LEDGER = "results.jsonl"
_ENTRY_CHARS = 16


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """One entry before ranking. result: None when nothing was measured.

    state: "measured" | "refused" | "failed" | "superseded". reasons: why it is not ranked.
    folder: where its result lies, for its report.
    """

    team: str
    name: str
    family: str
    identity: str
    state: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    is_final: bool
    result: Mapping[str, Any] | None
    folder: Path | None


def read_submissions(paths: Iterable[str | Path]) -> list[Submitted]:
    """Every entry of the given folders and files, in their order; each content once.

    A path is a folder with results.jsonl, as `paceline judge publish` writes it; a run folder; a
    result.json; or a folder of such folders. Raises ResultError for anything else.
    """
    found: list[Submitted] = []
    for path in map(Path, paths):
        own = list(_read_path(path))
        if not own:
            raise ResultError(
                "holds no result",
                where=str(path),
                expected="a run folder, a folder of them, or one of `paceline judge publish`",
            )
        found += own
    seen: set[str] = set()
    for entry in found:
        if entry.identity in seen:
            raise ResultError(
                f"'{entry.name}' is there twice", where=entry.identity, fix="Name each result once."
            )
        seen.add(entry.identity)
    return found


def _read_path(path: Path) -> Iterable[Submitted]:
    if path.is_file():
        return [_read_run(path)]
    if (path / _LEDGER).is_file():
        return _read_judged(path)
    if (path / "result.json").is_file():
        return [_read_run(path / "result.json")]
    if not path.is_dir():
        raise ResultError("there is no such folder", where=str(path))
    inner = sorted(folder for folder in path.iterdir() if (folder / "result.json").is_file())
    return [_read_run(folder / "result.json") for folder in inner]


def _read_run(path: Path) -> Submitted:
    result = _read_result(path)
    folder = path.parent.resolve()
    return Submitted(
        team="",
        name=name_draft(result, "candidate", limit=48),
        family=clean_text(pick_text(result, "arms", "candidate", "draft", "family") or "none"),
        identity=str(folder),
        state="measured",
        reasons=(),
        notes=(),
        is_final=False,
        result=result,
        folder=folder,
    )


def _read_result(path: Path) -> dict[str, Any]:
    result = read_json(path)
    try:
        require_format(result)
    except ResultError as problem:
        raise ResultError(problem.what, where=str(path), expected=problem.expected) from None
    return result


def _read_judged(path: Path) -> list[Submitted]:
    """A judge's public folder. Of a team only the final entry counts, else the latest."""
    entries: dict[str, Submitted] = {}
    finals: dict[str, str] = {}
    for number, line in enumerate(read_jsonl(path / _LEDGER), 1):
        where = f"{path / _LEDGER}:{number}"
        body = line.get("body")
        if not isinstance(body, dict) or not isinstance(body.get("content_sha256"), str):
            raise ResultError("is not a line of a judge's ledger", where=where)
        identity = body["content_sha256"]
        if body.get("kind") == "final":
            finals[str(body.get("team"))] = identity
            continue
        entries.pop(identity, None)  # measured again after it had failed: the later line counts
        entries[identity] = _read_line(path, body, where)
    latest = {entry.team: identity for identity, entry in entries.items()}
    counting = {**latest, **{clean_text(team, limit=64): one for team, one in finals.items()}}
    return [
        replace(
            entry,
            is_final=identity in finals.values(),
            state=entry.state if counting[entry.team] == identity else "superseded",
        )
        for identity, entry in entries.items()
    ]


def _read_line(path: Path, body: Mapping[str, Any], where: str) -> Submitted:
    identity = str(body["content_sha256"])
    state = {"done": "measured", "refused": "refused", "failed": "failed"}.get(
        str(body.get("state"))
    )
    if state is None:
        raise ResultError(f"state is {body.get('state')!r}", where=where)
    folder = path / "entries" / identity[:_ENTRY_CHARS]
    result = None
    if state == "measured":
        result = _read_result(folder / "result.json")
        signed = body.get("result_sha256")
        if signed is not None and sha256_file(folder / "result.json") != signed:
            raise ResultError(
                "is not the result that the judge signed", where=str(folder / "result.json")
            )
    reason = clean_text(pick_text(body, "reason") or "")
    return Submitted(
        team=clean_text(pick_text(body, "team") or "", limit=64),
        name=clean_text(pick_text(body, "name") or "unnamed", limit=48),
        family=clean_text(pick_text(body, "family") or ""),
        identity=identity,
        state=state,
        reasons=tuple(
            clean_text(text)
            for text in (*((reason,) if reason else ()), *pick_list(body, "withheld"))
        ),
        notes=tuple(clean_text(text) for text in pick_list(body, "notes")),
        is_final=False,
        result=result,
        folder=folder if result is not None else None,
    )
