"""A repository at one commit -> a folder, and a manifest of hashes beside it.

Nothing that is fetched is run or even read as anything but bytes. The folder appears whole or not
at all; what an interrupted call got is kept under a hidden name and used by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import HubError, StorageError
from paceline.hub.client import Hub, open_hub
from paceline.hub.download import FileHashes, download_file, hash_file, open_plain
from paceline.hub.listing import Listing, list_files
from paceline.hub.names import HubRef, Kind
from paceline.problems import show_value
from paceline.records import build_provenance, read_json, storage_errors, write_json

__all__ = [
    "DEFAULT_MAX_BYTES",
    "fetch_folder",
    "fetch_to_cache",
    "manifest_path",
    "read_manifest",
    "verify_folder",
]

FORMAT = "paceline-fetch/1"
DEFAULT_MAX_BYTES: dict[Kind, int] = {"draft": 8 * 10**9, "target": 10**12}
_SPARE_BYTES = 16 * 2**20
_SECONDS_BETWEEN_LINES = 10.0
_log = logging.getLogger("paceline.hub")

OnProgress = Callable[[int, int], None]


def manifest_path(folder: str | Path) -> Path:
    """`entry.fetch.json` beside `entry`: the folder holds what its author sent and nothing else."""
    folder = Path(folder).absolute()
    return folder.with_name(f"{folder.name}.fetch.json")


def fetch_folder(
    ref: HubRef,
    out_dir: str | Path,
    *,
    kind: Kind = "draft",
    max_bytes: int | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Fetches one commit into `out_dir` and returns the manifest.

    A folder that is there already is asked after again: the Hub must still hold the same files at
    that commit, and the folder too. on_progress: bytes done, bytes in all.
    Raises HubError, and StorageError where the folder cannot be written.
    """
    out = Path(out_dir).absolute()
    hub = open_hub()
    max_bytes = DEFAULT_MAX_BYTES[kind] if max_bytes is None else max_bytes
    if os.path.lexists(out):
        return _check_again(hub, ref, out, kind, max_bytes)
    listing = list_files(hub, ref, kind=kind, max_bytes=max_bytes)
    staging = out.with_name(f".{out.name}.fetch-{ref.commit[:12]}")
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(exist_ok=True)
        with _locked(staging) as handle:
            _require_room(staging, listing, handle)
            files = _download_all(hub, ref, listing, handle, on_progress)
            _require_only(staging, files)
            manifest = _build_manifest(hub, ref, kind, listing, files)
            write_json(manifest_path(out), manifest)
            os.rename(staging, out)
    return manifest


def fetch_to_cache(ref: HubRef, cache: Path, *, kind: Kind) -> Path:
    """The folder of one commit in the user's cache, fetched on first use; later uses ask nothing.

    Later uses compare names and sizes with the manifest; `paceline fetch --verify` compares hashes.
    """
    folder = cache / "hub" / kind / ref.repo_id.replace("/", "--") / ref.commit
    if _is_complete(folder):
        return folder
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(folder):  # another process may have fetched it while we waited
                if folder.is_dir():  # damaged: its files are not those of its manifest
                    shutil.rmtree(folder)
                fetch_folder(ref, folder, kind=kind)
    return folder


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest beside a fetched folder. Raises HubError where it is missing or malformed."""
    path = manifest_path(folder)
    manifest = read_json(path, error=HubError, expected="the manifest that `paceline fetch` wrote")
    files = manifest.get("files")
    sound = (
        manifest.get("format") == FORMAT
        and isinstance(files, dict)
        and all(isinstance(item, dict) and "sha256" in item for item in files.values())
    )
    if not sound:
        raise HubError("is not a manifest of `paceline fetch`", where=str(path), expected=FORMAT)
    return manifest


def verify_folder(folder: str | Path) -> list[str]:
    """Hashes every file again. One sentence for each that is changed, missing or new; [] is well.

    Raises HubError without a manifest, StorageError where the folder cannot be read.
    """
    folder = Path(folder)
    recorded: dict[str, dict[str, Any]] = read_manifest(folder)["files"]
    found = []
    with storage_errors(folder):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            names = set(os.listdir(handle))  # noqa: PTH208
            for name, record in sorted(recorded.items()):
                if name not in names:
                    found.append(f"{name}: is gone")
                elif problem := _differs(name, handle, record):
                    found.append(f"{name}: {problem}")
        finally:
            os.close(handle)
    found += [
        f"{show_value(name)}: was not fetched, it came later"
        for name in sorted(names - {*recorded})
    ]
    return found


def _differs(name: str, folder_handle: int, record: dict[str, Any]) -> str:
    try:
        handle = open_plain(name, folder_handle, os.O_RDONLY)
    except HubError as problem:
        return problem.what
    try:
        hashes = hash_file(handle)
    finally:
        os.close(handle)
    if hashes.sha256 == record["sha256"]:
        return ""
    return f"sha256 is {hashes.sha256}, fetched was {record['sha256']}"


def _check_again(hub: Hub, ref: HubRef, out: Path, kind: Kind, max_bytes: int) -> dict[str, Any]:
    fix = "Choose another --out, or remove it first."
    if not out.is_dir() or out.is_symlink():
        raise StorageError("exists and is not a folder", where=str(out), fix=fix)
    if not manifest_path(out).is_file():
        raise StorageError("already exists and was not fetched", where=str(out), fix=fix)
    manifest = read_manifest(out)
    if (manifest.get("repo"), manifest.get("commit")) != (ref.repo_id, ref.commit):
        before = f"{show_value(manifest.get('repo'))}@{show_value(manifest.get('commit'))}"
        raise StorageError(f"already holds {before}", where=str(out), fix=fix)
    listing = list_files(hub, ref, kind=kind, max_bytes=max_bytes)
    now = {entry.name: _identity(entry.lfs_sha256, entry.blob_id) for entry in listing.entries}
    then = {
        name: _identity(item["sha256"] if item.get("lfs") else None, item.get("blob_id"))
        for name, item in manifest["files"].items()
    }
    if now != then:
        changed = sorted(name for name in now.keys() | then if now.get(name) != then.get(name))
        raise HubError(
            f"the Hub now holds other files at this commit: {', '.join(changed[:5])}",
            where=str(ref),
            expected="what was fetched before",
            fix="A commit cannot change; treat the repository as replaced.",
            rule="repo.moved",
        )
    if differences := verify_folder(out):
        raise HubError(
            f"the folder is not what was fetched: {differences[0]}",
            where=str(out),
            fix="Remove the folder and fetch it again.",
            rule="repo.moved",
        )
    return manifest


def _identity(lfs_sha256: str | None, blob_id: Any) -> str:
    return f"sha256 {lfs_sha256}" if lfs_sha256 else f"blob {blob_id}"


@contextlib.contextmanager
def _locked(staging: Path) -> Iterator[int]:
    """The staging folder, held; the kernel lets go of it when its holder dies."""
    handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                "another process is fetching into it", where=str(staging), fix="Wait for that one."
            ) from None
        yield handle
    finally:
        os.close(handle)


def _require_room(staging: Path, listing: Listing, handle: int) -> None:
    """The disk must hold what is still to come, before it comes."""
    kept = sum(
        os.stat(name, dir_fd=handle, follow_symlinks=False).st_size for name in os.listdir(handle)
    )
    needed = listing.num_bytes - kept + _SPARE_BYTES
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise StorageError(
            "the disk is too full",
            where=str(staging.parent),
            expected=f"{needed:,} bytes free, found {free:,}",
            fix="Free some space and run the same command again.",
        )


def _download_all(
    hub: Hub, ref: HubRef, listing: Listing, handle: int, on_progress: OnProgress | None
) -> dict[str, FileHashes]:
    total, done, last = listing.num_bytes, 0, time.monotonic()
    _log.info("fetching %s: %d files, %s bytes", ref, len(listing.entries), f"{total:,}")

    def advance(num_bytes: int) -> None:
        nonlocal done, last
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)
        elif time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            _log.info("fetching %s: %s of %s bytes", ref, f"{done:,}", f"{total:,}")

    return {
        entry.name: download_file(hub, ref, entry, handle, on_bytes=advance)
        for entry in listing.entries
    }


def _require_only(staging: Path, files: dict[str, FileHashes]) -> None:
    others = sorted({item.name for item in staging.iterdir()} - set(files))
    if others:
        raise StorageError(
            f"holds '{show_value(others[0])}', which this command did not write",
            where=str(staging),
            fix="Remove that folder and run the same command again.",
        )


def _build_manifest(
    hub: Hub, ref: HubRef, kind: Kind, listing: Listing, files: dict[str, FileHashes]
) -> dict[str, Any]:
    lfs = {entry.name for entry in listing.entries if entry.lfs_sha256 is not None}
    return {
        "format": FORMAT,
        "repo": ref.repo_id,
        "commit": ref.commit,
        "endpoint": hub.endpoint,
        "kind": kind,
        "files": {
            name: {
                "bytes": hashes.num_bytes,
                "sha256": hashes.sha256,
                "blob_id": hashes.blob_id,
                "lfs": name in lfs,
            }
            for name, hashes in files.items()
        },
        "left_out": list(listing.left_out),
        "provenance": build_provenance(),
    }


def _is_complete(folder: Path) -> bool:
    """The cheap check of every use: exactly the files of the manifest, each with its size."""
    if not folder.is_dir() or not manifest_path(folder).is_file():
        return False
    try:
        files = read_manifest(folder)["files"]
    except HubError:
        return False
    return {item.name for item in folder.iterdir()} == set(files) and all(
        (folder / name).stat().st_size == item.get("bytes") for name, item in files.items()
    )
