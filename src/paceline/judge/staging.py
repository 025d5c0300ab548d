"""A stranger's folder -> our own copy under the hash of its bytes, and the hash that names it.

Two hashes. `files_sha256` covers every byte of the copy and is looked at again before a run.
`content_sha256` covers what the engine would load: tensors by name, type, shape and bytes, and the
settings in config.json and spec.json whatever their layout. Another name in metadata.json, another
order of keys or another split into shards does not make a new draft.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from paceline.draft import Draft, read_draft
from paceline.errors import DraftError
from paceline.problems import show_value
from paceline.records import sha256_file, storage_errors

__all__ = ["Staged", "hash_content", "hash_files", "require_unchanged", "stage_folder"]

_CHUNK = 1 << 22
_MAX_FILES = 64


@dataclass(frozen=True, kw_only=True)
class Staged:
    """One draft in the judge's own keeping."""

    path: Path
    name: str
    family: str
    content_sha256: str
    files_sha256: str


def stage_folder(source: str | Path, drafts_dir: str | Path, *, max_bytes: int) -> Staged:
    """Copies a draft folder to drafts_dir/<files_sha256> and reads it there.

    Only regular files of one flat folder are copied, never through a link, and no more than
    `max_bytes` in all. A killed copy leaves only a temporary folder. Raises DraftError.
    """
    source, drafts_dir = Path(source), Path(drafts_dir)
    temporary = drafts_dir / f".incoming-{os.getpid()}-{os.urandom(4).hex()}"
    with storage_errors(drafts_dir):
        temporary.mkdir(parents=True)
        try:
            _copy(source, temporary, max_bytes)
            read_draft(temporary)  # what cannot be read is refused before it has a place
            path = drafts_dir / hash_files(temporary)
            if not path.exists():
                try:
                    os.rename(temporary, path)
                except OSError:
                    if not path.exists():  # else another process was faster with the same bytes
                        raise
        except DraftError as problem:
            raise _about(source, temporary, problem) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    draft = read_draft(path)
    return Staged(
        path=path,
        name=draft.name if draft.metadata.get("name") else source.name,
        family=draft.family,
        content_sha256=hash_content(draft),
        files_sha256=path.name,
    )


def require_unchanged(path: str | Path, *, files_sha256: str, content_sha256: str) -> Draft:
    """Reads a staged draft again and hashes all of it. Raises DraftError when a byte changed."""
    path = Path(path)
    if not path.is_dir():
        raise DraftError("the staged draft is gone", where=path.name)
    found = hash_files(path)
    draft = read_draft(path) if found == files_sha256 else None
    if draft is None or hash_content(draft) != content_sha256:
        raise DraftError(
            "the staged draft was changed after it was entered",
            where=path.name,
            expected=f"files of hash {files_sha256[:12]}, found {found[:12]}",
        )
    return draft


def hash_files(path: str | Path) -> str:
    """sha256 over names and contents of all files of a flat folder."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        digest.update(f"{file.name}\0{sha256_file(file)}\n".encode())
    return digest.hexdigest()


def hash_content(draft: Draft) -> str:
    """sha256 over what the engine loads: see the module's text."""
    digest = hashlib.sha256()
    for record in (draft.config, draft.spec):
        digest.update(json.dumps(record, sort_keys=True, ensure_ascii=True).encode() + b"\n")
    for name in sorted(draft.tensors):
        tensor = draft.tensors[name]
        head = f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0"
        digest.update(head.encode())
        with open(draft.path / draft.tensor_files[name], "rb") as file:
            file.seek(tensor.start)
            left = tensor.end - tensor.start
            own = hashlib.sha256()
            while left and (part := file.read(min(left, _CHUNK))):
                own.update(part)
                left -= len(part)
        digest.update(own.hexdigest().encode() + b"\n")
    return digest.hexdigest()


def _copy(source: Path, out: Path, max_bytes: int) -> None:
    left = max_bytes
    with os.scandir(source) as found:
        names = sorted(item.name for item in found)
    if len(names) > _MAX_FILES:
        raise DraftError(
            f"has {len(names)} files", where=str(source), expected=f"at most {_MAX_FILES}"
        )
    for name in names:
        where = f"{source}/{show_value(name)}"
        try:
            handle = os.open(
                source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            raise DraftError("is a link or cannot be read", where=where) from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise DraftError("is not a regular file", where=where)
        with os.fdopen(handle, "rb") as file, open(out / name, "xb") as copy:
            while part := file.read(_CHUNK):
                left -= len(part)
                if left < 0:
                    raise DraftError(
                        "the folder is too large",
                        where=str(source),
                        expected=f"at most {max_bytes:,} bytes",
                    )
                copy.write(part)
            copy.flush()
            os.fsync(copy.fileno())


def _about(source: Path, temporary: Path, problem: DraftError) -> DraftError:
    """The same message about the folder that its author knows."""
    return DraftError(
        problem.what,
        where=problem.where.replace(str(temporary), str(source)),
        expected=problem.expected,
        fix=problem.fix,
    )
