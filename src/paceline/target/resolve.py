"""A target's name or folder -> the folder on disk.

The folder of a bundled target is made once, in the user's cache: written under a temporary name
while a lock is held, checksummed, then renamed. A killed process leaves nothing behind that a
later one would use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import StorageError, TargetError
from paceline.hub import fetch_to_cache, is_hub_spec, parse_ref
from paceline.records import read_json, sha256_file, storage_errors, write_json
from paceline.target.gguf_source import find_smollm2_gguf, write_gguf_folder

__all__ = ["MANIFEST_NAME", "cache_folder", "resolve_target", "verify_target"]

MANIFEST_NAME = "paceline-target.json"
_FORMAT = "paceline-target/1"
_BUNDLED = Path(__file__).parent / "bundled"


def cache_folder() -> Path:
    """$PACELINE_CACHE, else ~/.cache/paceline."""
    stated = os.environ.get("PACELINE_CACHE")
    return Path(stated) if stated else Path.home() / ".cache" / "paceline"


def resolve_target(spec: str) -> Path:
    """Folder of a target: a bundled name (`smollm2` is made on first use), a local folder, or
    owner/name@commit, fetched once into the user's cache.

    Raises TargetError for a name or folder that does not exist, MissingExtraError when the
    bundled target's package is absent, StorageError when the cache cannot be written, HubError
    where the Hub does not give it.
    """
    if spec == "smollm2":
        return _resolve_smollm2()
    if spec in _list_shipped():
        return _BUNDLED / spec
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise TargetError("is a file", where=spec, expected="a folder with config.json")
    if is_hub_spec(spec):
        return fetch_to_cache(parse_ref(spec), cache_folder(), kind="target")
    raise TargetError(
        "there is no such target",
        where=spec,
        expected=f"{' or '.join(('smollm2', *_list_shipped()))}, a Hugging Face folder or"
        " owner/name@commit",
        fix="Check the spelling of --target.",
    )


def _list_shipped() -> tuple[str, ...]:
    """Names of the targets whose weights come with the package."""
    if not _BUNDLED.is_dir():
        return ()
    return tuple(sorted(f.name for f in _BUNDLED.iterdir() if (f / "config.json").is_file()))


def verify_target(path: str | Path) -> list[str]:
    """Full check of a bundled target's folder: names of files whose sha256 is not the recorded one.

    Raises TargetError when the folder has no manifest. An empty list means that all is well.
    """
    folder = Path(path)
    manifest = read_json(folder / MANIFEST_NAME, error=TargetError)
    return [
        name
        for name, record in sorted(manifest["files"].items())
        if not (folder / name).is_file() or sha256_file(folder / name) != record["sha256"]
    ]


def _resolve_smollm2() -> Path:
    gguf_path = find_smollm2_gguf()
    source_sha256 = sha256_file(gguf_path)
    folder = cache_folder() / "targets" / f"smollm2-{source_sha256[:12]}"
    if _is_complete(folder):
        return folder
    with _locked(folder):
        if not _is_complete(folder):  # another process may have made it while we waited
            _build(folder, gguf_path, source_sha256)
    return folder


def _is_complete(folder: Path) -> bool:
    """The cheap check of every use: the manifest is there and each file has its recorded size."""
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        manifest = read_json(folder / MANIFEST_NAME, error=TargetError)
    except TargetError:
        return False
    files = manifest.get("files")
    return (
        manifest.get("format") == _FORMAT
        and isinstance(files, dict)
        and all(
            (folder / name).is_file() and (folder / name).stat().st_size == record["bytes"]
            for name, record in files.items()
        )
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock file; the kernel frees it when a holder dies."""
    lock = folder.with_name(f".{folder.name}.lock")
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "w")  # noqa: SIM115
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, gguf_path: Path, source_sha256: str) -> None:
    """Makes the folder; the caller holds its lock, so leftovers of killed builds are removed."""
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        with storage_errors(folder):
            temporary.mkdir()
            write_gguf_folder(gguf_path, temporary, name="smollm2")
            _write_manifest(temporary, gguf_path, source_sha256)
            if folder.exists():  # incomplete or damaged: its sizes disagree with its manifest
                shutil.rmtree(folder)
            os.rename(temporary, folder)
    except StorageError as problem:
        raise StorageError(
            f"the target 'smollm2' cannot be unpacked: {problem.what}",
            where=str(folder),
            expected="280 MB of free space",
            fix="Free some space, or set PACELINE_CACHE to a folder on another disk.",
        ) from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_manifest(folder: Path, gguf_path: Path, source_sha256: str) -> None:
    files: dict[str, Any] = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
    }
    source = {"file": gguf_path.name, "sha256": source_sha256}
    record = {"format": _FORMAT, "name": "smollm2", "source": source, "files": files}
    write_json(folder / MANIFEST_NAME, record)
