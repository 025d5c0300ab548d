"""What one commit of a repository holds, checked before a byte of it is fetched."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.errors import HubError
from paceline.hub.client import Hub, ask
from paceline.hub.names import HUB_OWN_FILES, HubRef, Kind, is_allowed
from paceline.problems import show_value

__all__ = ["Entry", "Listing", "list_files"]

_MAX_ENTRIES = {"draft": 80, "target": 5000}
_MAX_TEXT_BYTES = {"draft": 16 * 2**20, "target": 64 * 2**20}  # any file that is not weights
_HEX = re.compile(r"[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file at one commit. blob_id: git's sha1; lfs_sha256: of the content, if kept by LFS."""

    name: str
    num_bytes: int
    blob_id: str
    lfs_sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """entries: what will be fetched, by name. left_out: names that a target does not need."""

    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def list_files(hub: Hub, ref: HubRef, *, kind: Kind, max_bytes: int) -> Listing:
    """The files at that very commit. Raises HubError for anything that should not be there.

    For a draft every other file is an error; for a target plain extra files are left out, and
    named. max_bytes: of all files together.
    """
    where = str(ref)
    info = ask(hub, where, lambda: hub.api.model_info(ref.repo_id, revision=ref.commit))
    if info.sha != ref.commit:
        raise HubError(
            f"the Hub answers with another commit, {show_value(info.sha)}",
            where=where,
            expected="the commit that was named",
            fix="A branch or tag may be spelled like a commit; name the commit itself.",
            rule="rev.sha",
        )
    items = ask(
        hub,
        where,
        lambda: list(
            itertools.islice(
                hub.api.list_repo_tree(ref.repo_id, revision=ref.commit, recursive=True),
                _MAX_ENTRIES[kind] + 1,
            )
        ),
    )
    if len(items) > _MAX_ENTRIES[kind]:
        raise HubError(
            "the repository holds too many files",
            where=where,
            expected=f"at most {_MAX_ENTRIES[kind]}",
            fix="Keep the draft in a repository of its own." if kind == "draft" else "",
            rule="fs.count",
        )
    return _sort_out(items, ref, kind, max_bytes)


def _sort_out(items: Iterable[Any], ref: HubRef, kind: Kind, max_bytes: int) -> Listing:
    entries: dict[str, Entry] = {}
    left_out: list[str] = []
    for item in items:
        name = item.path
        _require_plain(name, ref)
        if name in HUB_OWN_FILES:
            continue
        is_file = hasattr(item, "blob_id")
        if not is_file or not is_allowed(name, kind):
            left_out.append(name)
            continue
        entry = _read_entry(item, ref)
        other = entries.setdefault(name.casefold(), entry)
        if other is not entry:
            raise HubError(
                f"'{name}' and '{other.name}' are one name on some disks",
                where=str(ref),
                rule="fs.flat",
            )
        _check_size(entry, ref, kind)
    if left_out and kind == "draft":
        shown = ", ".join(show_value(name, limit=40) for name in sorted(left_out)[:5])
        more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        raise HubError(
            f"the repository holds what no draft has: {shown}{more}",
            where=str(ref),
            expected="config.json, model.safetensors (or numbered shards and their index),"
            " spec.json, metadata.json, README.md, LICENSE",
            fix="Its author removes them and names the new commit; nothing was downloaded.",
            rule="fs.allow",
        )
    if not entries:
        raise HubError(f"the repository holds no {kind} at this commit", where=str(ref))
    listing = Listing(
        entries=tuple(sorted(entries.values(), key=lambda entry: entry.name)),
        left_out=tuple(sorted(left_out)),
    )
    if listing.num_bytes > max_bytes:
        raise HubError(
            f"the files are {listing.num_bytes:,} bytes long together",
            where=str(ref),
            expected=f"at most {max_bytes:,}",
            fix="Nothing was downloaded; raise the limit with --max-bytes if that is meant.",
            rule="fs.size",
        )
    return listing


def _require_plain(name: Any, ref: HubRef) -> None:
    """A path that leaves its folder, or cannot be printed, ends it all: no Hub makes such."""
    bad = (
        not isinstance(name, str)
        or not name
        or not name.isprintable()
        or name.startswith("/")
        or "\\" in name
        or any(part in ("", ".", "..") for part in name.split("/"))
    )
    if bad:
        raise HubError(
            f"the repository lists a file under the name '{show_value(name)}'",
            where=str(ref),
            expected="plain names inside the repository",
            fix="Do not use this repository. Nothing was downloaded.",
            rule="fs.flat",
        )


def _read_entry(item: Any, ref: HubRef) -> Entry:
    lfs = item.lfs
    sha256 = lfs.sha256 if lfs is not None else None
    size = lfs.size if lfs is not None else item.size
    good = (
        isinstance(size, int)
        and not isinstance(size, bool)
        and size >= 0
        and _is_hex(item.blob_id, 40)
        and (lfs is None or _is_hex(sha256, 64))
    )
    if not good:
        raise HubError(
            f"the Hub lists '{show_value(item.path)}' without a proper size and hash",
            where=str(ref),
            fix="Check HF_ENDPOINT.",
        )
    return Entry(name=item.path, num_bytes=size, blob_id=item.blob_id, lfs_sha256=sha256)


def _is_hex(value: Any, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and _HEX.fullmatch(value) is not None


def _check_size(entry: Entry, ref: HubRef, kind: Kind) -> None:
    limit = _MAX_TEXT_BYTES[kind]
    if not entry.name.endswith(".safetensors") and entry.num_bytes > limit:
        raise HubError(
            f"'{entry.name}' is {entry.num_bytes:,} bytes long",
            where=str(ref),
            expected=f"at most {limit:,} for a file that is not weights",
            fix="Nothing was downloaded.",
            rule="fs.size",
        )
