"""A raw run folder -> what may be shown: every figure, and no word or token of a hidden prompt.

The sealed result is recomputed by `paceline score` like any other. Request ids become pseudonyms
that are the same in every run of this judge and cannot be turned back without its key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ResultError
from paceline.judge.screen import Screen, screen_text
from paceline.records import read_json, read_jsonl, storage_errors

__all__ = ["seal_result", "seal_transcript", "write_private"]

_NO_ANSWER = "the engine gave no answer"
# subtrees that were fixed before any prompt was read: no word of a prompt can be in them
_STATIC = {"rules", "target", "draft", "engine", "versions"}
# texts and tokens of prompts and answers; an empty list or null stands in their place
_DROPPED = {"samples", "cases", "messages", "prompt", "prompts_text", "text", "token"}
_MACHINE = ("paceline_version", "git_sha", "python", "machine", "packages", "created_at", "seed")


def seal_result(run_dir: str | Path, *, screen: Screen, key: bytes) -> dict[str, Any]:
    """result.json of a run folder without anything that a hidden prompt could be read from."""
    result = read_json(Path(run_dir) / "result.json")
    names = _pseudonyms(result, key)
    categories = set((result.get("prompts") or {}).get("categories") or {})
    made = result.get("provenance") or {}

    def show(text: str) -> str:
        return names.get(text) or (text if text in categories else screen_text(screen, text))

    sealed = _walk(
        {name: value for name, value in result.items() if name != "provenance"},
        show,
        # our own keys are words of code; any other key is an id, a category or a text
        lambda key: key if key.isidentifier() and key not in names else show(key),
    )
    sealed["provenance"] = {
        **{name: made[name] for name in _MACHINE if name in made},
        "command": ["paceline", "judge", "run"],
        "inputs": {},
    }
    return dict(sealed)


def seal_transcript(run_dir: str | Path, *, key: bytes) -> bytes:
    """requests.jsonl for the organiser's own file: no prompt tokens, no error texts, pseudonyms."""
    lines = []
    for row in read_jsonl(Path(run_dir) / "requests.jsonl"):
        kept = {
            name: value
            for name, value in row.items()
            if name not in ("prompt_ids", "error", "settings")
        }
        if "id" in kept:
            kept["id"] = _pseudonym(str(kept["id"]), key)
        lines.append(json.dumps(kept, ensure_ascii=True, allow_nan=False) + "\n")
    return "".join(lines).encode("ascii")


def write_private(path: str | Path, data: bytes) -> str:
    """Writes a file that only its owner reads, atomically; returns its sha256."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return hashlib.sha256(data).hexdigest()


def _pseudonym(request_id: str, key: bytes) -> str:
    digest = hmac.new(key, b"request\0" + request_id.encode("utf-8"), hashlib.sha256)
    return f"hidden-{digest.hexdigest()[:12]}"


def _pseudonyms(result: Mapping[str, Any], key: bytes) -> dict[str, str]:
    arms = result.get("arms")
    if not isinstance(arms, dict) or not arms:
        raise ResultError("the run holds no arm", where="result.json")
    return {
        str(entry["id"]): _pseudonym(str(entry["id"]), key)
        for arm in arms.values()
        for entry in arm.get("requests") or ()
    }


def _walk(value: Any, show: Callable[[str], str], show_key: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return show(value)
    if isinstance(value, list):
        return [_walk(item, show, show_key) for item in value]
    if not isinstance(value, Mapping):
        return value
    sealed: dict[str, Any] = {}
    for name, item in value.items():
        if name in _STATIC:
            sealed[name] = item
        elif name in _DROPPED or name.endswith(("_ids", "_token", "_text")):
            sealed[name] = [] if isinstance(item, list) else None
        elif name in ("failure", "error"):
            sealed[name] = None if item is None else _NO_ANSWER
        else:
            sealed[show_key(name)] = _walk(item, show, show_key)
    return sealed
