"""One file from the Hub: no link followed, no byte more than listed, resumable, hash checked."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import HubError
from paceline.hub.client import Hub, TransientHubError, hub_errors
from paceline.hub.listing import Entry
from paceline.hub.names import HubRef

__all__ = ["FileHashes", "download_file", "hash_file", "is_lfs_pointer", "open_plain"]

_POINTER = b"version https://git-lfs.github.com/spec/v1"
_NUM_ATTEMPTS = 4  # without a byte of progress between them
_FIRST_WAIT_S = 1.0
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class FileHashes:
    """num_bytes, sha256 of the content, and blob_id: the sha1 by which git names it."""

    num_bytes: int
    sha256: str
    blob_id: str


class _TooLong(Exception):
    """The Hub sends more than it listed."""


class _Sink:
    """The file that huggingface_hub writes into; refuses to grow beyond what was listed."""

    def __init__(self, handle: int, limit: int, on_bytes: Callable[[int], None]) -> None:
        self._handle, self._limit, self._on_bytes = handle, limit, on_bytes

    def write(self, data: bytes) -> int:
        if self.tell() + len(data) > self._limit:
            raise _TooLong
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view) :]
        self._on_bytes(len(data))
        return len(data)

    def seek(self, position: int) -> int:
        return os.lseek(self._handle, position, os.SEEK_SET)

    def tell(self) -> int:
        return os.lseek(self._handle, 0, os.SEEK_CUR)

    def truncate(self) -> int:
        self._on_bytes(self.tell() - os.fstat(self._handle).st_size)
        os.ftruncate(self._handle, self.tell())
        return self.tell()


def open_plain(name: str, folder_handle: int, flags: int) -> int:
    """Opens a regular file of its own inside a folder; a link, device or second name is refused."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, 0o644, dir_fd=folder_handle)
    except OSError as problem:
        if problem.errno == 40:  # ELOOP
            raise HubError(
                "is a symbolic link", where=name, fix="Remove it.", rule="fs.type"
            ) from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(handle)
        raise HubError(
            "is not a regular file of its own", where=name, fix="Remove it.", rule="fs.type"
        )
    return handle


def hash_file(handle: int) -> FileHashes:
    """Reads an open file once, from its beginning."""
    size = os.fstat(handle).st_size
    sha256 = hashlib.sha256()
    sha1 = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    position = 0
    while data := os.pread(handle, _CHUNK_BYTES, position):
        sha256.update(data)
        sha1.update(data)
        position += len(data)
    return FileHashes(num_bytes=position, sha256=sha256.hexdigest(), blob_id=sha1.hexdigest())


def is_lfs_pointer(handle: int) -> bool:
    return os.pread(handle, len(_POINTER), 0) == _POINTER


def download_file(
    hub: Hub,
    ref: HubRef,
    entry: Entry,
    folder_handle: int,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> FileHashes:
    """Fetches one listed file into the folder, going on where an earlier call stopped.

    on_bytes: how much longer the file got, negative when it starts again. Returns the hashes of
    what is on disk, which are the listed ones. Raises HubError; OSError of the disk passes.
    """
    handle = open_plain(entry.name, folder_handle, os.O_RDWR | os.O_CREAT)
    try:
        kept = os.fstat(handle).st_size
        if kept > entry.num_bytes:
            os.ftruncate(handle, 0)
            kept = 0
        on_bytes(kept)
        _fill(hub, ref, entry, handle, on_bytes)
        hashes = hash_file(handle)
        if not _is_listed(hashes, entry) and kept:  # what was kept came from something else
            os.ftruncate(handle, 0)
            on_bytes(-entry.num_bytes)
            _fill(hub, ref, entry, handle, on_bytes)
            hashes = hash_file(handle)
        _require_listed(handle, hashes, entry, ref)
        os.fsync(handle)
        return hashes
    finally:
        os.close(handle)


def _fill(
    hub: Hub, ref: HubRef, entry: Entry, handle: int, on_bytes: Callable[[int], None]
) -> None:
    """Fetches until the file has its listed length; a failure without progress five times ends."""
    failures, wait_s = 0, _FIRST_WAIT_S
    while (before := os.fstat(handle).st_size) < entry.num_bytes or entry.num_bytes == 0:
        try:
            _get(hub, ref, entry, handle, before, on_bytes)
            return
        except TransientHubError as problem:
            after = os.fstat(handle).st_size
            failures = 1 if after > before else failures + 1
            # a rate limit was waited out by http_get already
            if failures >= _NUM_ATTEMPTS or problem.retry_after_s is not None:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 8.0) if failures > 1 else _FIRST_WAIT_S


def _get(
    hub: Hub,
    ref: HubRef,
    entry: Entry,
    handle: int,
    resume_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get

    url = hf_hub_url(ref.repo_id, entry.name, revision=ref.commit, endpoint=hub.endpoint)
    sink = _Sink(handle, entry.num_bytes, on_bytes)
    sink.seek(resume_bytes)
    where = f"{ref}: {entry.name}"
    try:
        with hub_errors(hub, where):
            http_get(
                url,
                sink,  # type: ignore[arg-type]  # what http_get uses of a file
                resume_size=resume_bytes,
                headers={**hub.headers, "Accept-Encoding": "identity"},
                expected_size=entry.num_bytes,
                displayed_filename=entry.name,
            )
    except _TooLong:
        raise HubError(
            "the Hub sends more than it listed",
            where=where,
            expected=f"{entry.num_bytes:,} bytes",
            fix="Do not use this repository: what it serves is not what the commit holds.",
            rule="lfs.hash",
        ) from None
    except OSError as problem:
        if problem.errno is not None:
            raise  # the disk
        os.fsync(handle)
        if is_lfs_pointer(handle):
            raise _pointer_error(where, entry) from None
        raise TransientHubError(
            f"the transfer ended after {os.fstat(handle).st_size:,} bytes",
            where=where,
            expected=f"{entry.num_bytes:,} bytes",
            fix="Run the same command again; it goes on from there.",
        ) from None


def _is_listed(hashes: FileHashes, entry: Entry) -> bool:
    if entry.lfs_sha256 is not None:
        return hashes.num_bytes == entry.num_bytes and hashes.sha256 == entry.lfs_sha256
    return hashes.num_bytes == entry.num_bytes and hashes.blob_id == entry.blob_id


def _require_listed(handle: int, hashes: FileHashes, entry: Entry, ref: HubRef) -> None:
    where = f"{ref}: {entry.name}"
    if is_lfs_pointer(handle):
        raise _pointer_error(where, entry)
    if not _is_listed(hashes, entry):
        os.ftruncate(handle, 0)
        raise HubError(
            "what the Hub sent is not what this commit holds: the hash differs",
            where=where,
            expected=entry.lfs_sha256 or entry.blob_id,
            fix="Run the same command again. If it stays so, do not use this repository.",
            rule="lfs.hash",
        )


def _pointer_error(where: str, entry: Entry) -> HubError:
    return HubError(
        "is a Git LFS pointer, a text of a few lines, not the file itself",
        where=where,
        expected=f"{entry.num_bytes:,} bytes of content" if entry.lfs_sha256 else "the content",
        fix="Its author uploads the file again (`paceline submit`) and names the new commit.",
        rule="lfs.pointer",
    )
