"""The judge's ledger: one signed line an event, each holding the hash of the line before it.

A line is `{"body": {...}, "hmac": "..."}`; the body has its number and the sha256 of the whole line
before. Whoever has the key can check that nobody else wrote a line; anybody can check that none was
changed, left out or put in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ResultError
from paceline.records import parse_json, storage_errors

__all__ = [
    "KEY_NAME",
    "LEDGER_FORMAT",
    "LEDGER_NAME",
    "build_line",
    "export_lines",
    "parse_lines",
    "read_key",
    "read_lines",
]

KEY_NAME = "judge.key"
LEDGER_NAME = "results.jsonl"
LEDGER_FORMAT = "paceline-judge/1"
_KEY_BYTES = 32


def read_key(path: str | Path, *, create: bool = False) -> bytes:
    """The signing key; with `create` a new one where there is none, readable by its owner only."""
    path = Path(path)
    if create and not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(_KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another process made one first: its key
                os.link(temporary, path)
            temporary.unlink()
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except FileNotFoundError:
        raise ResultError("there is no signing key", where=str(path)) from None
    except (OSError, ValueError):
        raise ResultError(
            "is not a signing key", where=str(path), expected=f"{2 * _KEY_BYTES} hex digits"
        ) from None
    if len(key) != _KEY_BYTES:
        raise ResultError(
            "is not a signing key", where=str(path), expected=f"{2 * _KEY_BYTES} hex digits"
        )
    return key


def build_line(key: bytes, body: Mapping[str, Any], *, seq: int, before: str) -> str:
    """One line, without its end. before: the line before it, "" for the first."""
    full = {
        "format": LEDGER_FORMAT,
        "seq": seq,
        "previous": _sha256(before) if before else "",
        **body,
    }
    return json.dumps({"body": full, "hmac": _sign(key, full)}, ensure_ascii=True, allow_nan=False)


def parse_lines(
    lines: Sequence[str], *, where: str, key: bytes | None = None
) -> list[dict[str, Any]]:
    """The bodies of all lines, checked: numbers, chain, no draft twice; with a key, signatures.

    Raises ResultError naming the first line that is wrong.
    """
    bodies: list[dict[str, Any]] = []
    seen: set[tuple[object, ...]] = set()
    before = ""
    for number, line in enumerate(lines):
        place = f"{where}:{number + 1}"
        record = parse_json(line, where=place)
        body = record.get("body") if isinstance(record, dict) else None
        if not isinstance(body, dict) or not isinstance(record.get("hmac"), str):
            raise ResultError("is not a line of a judge's ledger", where=place)
        if body.get("format") != LEDGER_FORMAT:
            raise ResultError(
                f"format is {body.get('format')!r}", where=place, expected=repr(LEDGER_FORMAT)
            )
        if body.get("seq") != number or body.get("previous") != (_sha256(before) if before else ""):
            raise ResultError(
                "does not follow the line before it",
                where=place,
                expected="every line in the order in which it was written",
                fix="A line was changed, left out or put in. Publish again from the judge's queue.",
            )
        if key is not None and not hmac.compare_digest(record["hmac"], _sign(key, body)):
            raise ResultError(
                "the signature is not this judge's",
                where=place,
                fix="The line was written or changed by somebody without the key.",
            )
        identity = (body.get("kind"), body.get("content_sha256"), body.get("round"))
        if identity in seen:
            raise ResultError("the same draft has two such lines", where=place)
        seen.add(identity)
        bodies.append(body)
        before = line
    return bodies


def read_lines(path: str | Path) -> list[str]:
    """The whole lines of a ledger file. Raises ResultError when there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultError(
            "there is no ledger", where=str(path), expected=f"a {LEDGER_NAME} of paceline judge"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ResultError(f"cannot be read: {problem}", where=str(path)) from None
    *lines, _cut = text.split("\n")
    return lines


def export_lines(path: str | Path, lines: Sequence[str]) -> int:
    """Appends to the file what it lacks of `lines`; returns how many. Never changes what is there.

    A last line cut by a kill is completed. Raises ResultError when the file holds something else.
    """
    path = Path(path)
    whole = "".join(line + "\n" for line in lines).encode("utf-8")
    with storage_errors(path), _open_locked(path) as file:
        present = file.read()
        if not whole.startswith(present):
            if present.startswith(whole):
                return 0  # another worker has written later lines meanwhile
            raise ResultError(
                "was changed: it is not the beginning of the judge's own ledger",
                where=str(path),
                fix="Move the file away; it is written again from the queue.",
            )
        missing = whole[len(present) :]
        if missing:
            file.write(missing)
            file.flush()
            os.fsync(file.fileno())
        return missing.count(b"\n")


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _sha256(line: str) -> str:
    return hashlib.sha256(line.encode("utf-8")).hexdigest()


def _sign(key: bytes, body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hmac.new(key, text.encode("ascii"), hashlib.sha256).hexdigest()
