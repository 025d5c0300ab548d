"""Everything static a draft folder says, read once, with every problem met on the way.

Only regular files are opened, none follows a link, all sizes are bounded, no tensor is loaded.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.draft.by_hand import check_by_hand, complete_spec, require_no_spec
from paceline.draft.envelope import Envelope, check_envelope, is_envelope, open_envelope
from paceline.draft.index import INDEX_NAME, check_index
from paceline.draft.spec import check_spec
from paceline.draft.table import FAMILIES
from paceline.draft.uncovered import SERVED_METHODS, find_uncovered
from paceline.problems import Problem, show_value
from paceline.safetensors_header import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    Header,
    TensorInfo,
    peek_header_bytes,
    scan_header,
)
from paceline.strict_json import JsonLimits, scan_json

__all__ = ["MAX_FILES", "FolderScan", "read_bytes", "scan_folder"]

MAX_FILES = 64
_INDEX_LIMITS = JsonLimits(max_bytes=16 * 1024 * 1024, max_depth=4, max_nodes=500_000)
_LIMITS = JsonLimits()
_MEDUSA_HEAD = re.compile(r"(?:medusa_heads\.|blocks\.)?(\d{1,4})\.")


@dataclass(frozen=True, kw_only=True)
class FolderScan:
    """What could be read. A field is None when its file is absent or unreadable.

    config: as vLLM reads it: of a speculators envelope the model inside, and envelope is the file
    itself; spec is then what the envelope says, where there is no spec.json. Of Medusa the heads
    are counted where config does not. raw_config: config.json as it stands. is_by_hand: spec is
    what the user gives on a command line, completed from the folder.
    """

    path: Path
    names: tuple[str, ...]
    spec: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    raw_config: dict[str, Any] | None = None
    envelope: Envelope | None = None
    metadata: dict[str, Any] | None = None
    index: dict[str, Any] | None = None
    headers: Mapping[str, Header] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    is_by_hand: bool = False

    @property
    def family(self) -> str | None:
        """The declared family, if it is one with a draft folder."""
        name = (self.spec or {}).get("family")
        return name if isinstance(name, str) and name in FAMILIES else None

    @property
    def uncovered(self) -> str | None:
        """What of the folder no contract describes though vLLM serves it, in words."""
        name = (self.spec or {}).get("family")
        if isinstance(name, str) and name in SERVED_METHODS:
            return f"a draft of method {name}"
        forms = (find_uncovered(self.family, c or {}) for c in (self.raw_config, self.config))
        return next((form for form in forms if form is not None), None)

    @property
    def tensors_by_file(self) -> dict[str, dict[str, TensorInfo]]:
        return {file: header.tensors for file, header in self.headers.items()}


def read_bytes(path: Path, *, max_bytes: int) -> tuple[bytes | None, list[Problem]]:
    """The bytes of a regular file; links, devices, FIFOs and oversized files are problems."""

    def refuse(rule: str, message: str, expected: str) -> tuple[None, list[Problem]]:
        name = show_value(path.name)
        return None, [
            Problem(
                rule=rule,
                file=name,
                found=message,
                expected=expected,
                message=message,
                fix="Replace it by the file itself.",
            )
        ]

    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            return refuse("fs.type", "is a symbolic link", "a regular file")
        return refuse("fs.read", f"cannot be opened: {problem.strerror}", "a readable file")
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return refuse("fs.type", "is not a regular file", "a regular file")
        if status.st_size > max_bytes:
            message = f"is too large: {status.st_size:,} bytes"
            return refuse("fs.size", message, f"at most {max_bytes:,} bytes")
        with os.fdopen(os.dup(handle), "rb") as file:
            return file.read(max_bytes + 1), []
    except OSError as problem:
        return refuse("fs.read", f"cannot be read: {problem.strerror}", "a readable file")
    finally:
        os.close(handle)


def _read_object(path: Path, limits: JsonLimits, problems: list[Problem]) -> dict[str, Any] | None:
    data, found = read_bytes(path, max_bytes=limits.max_bytes)
    problems.extend(found)
    if data is None:
        return None
    value, found = scan_json(data, file=path.name, limits=limits)
    problems.extend(found)
    if value is not None and not isinstance(value, dict):
        problems.append(
            Problem(
                rule="json.type",
                file=path.name,
                found=show_value(value),
                expected="an object",
                message="is not a JSON object",
                fix="Put the settings inside { }.",
            )
        )
        return None
    if value is None and not found:  # the document was `null`
        problems.append(
            Problem(
                rule="json.type",
                file=path.name,
                found="null",
                expected="an object",
                message="is not a JSON object",
                fix="Put the settings inside { }.",
            )
        )
    return value


def scan_folder(path: str | Path, *, by_hand: Mapping[str, Any] | None = None) -> FolderScan:
    """Reads spec, config, metadata, index and all safetensors headers. Never raises on content.

    by_hand: family and num_speculative_tokens in place of spec.json; raises DraftError beside one.
    """
    path = Path(path)
    problems: list[Problem] = []
    names = []
    with os.scandir(path) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > 4 * MAX_FILES:
                break
    names.sort()
    objects: dict[str, dict[str, Any] | None] = {}
    for name, limits in (
        ("spec.json", _LIMITS),
        ("config.json", _LIMITS),
        ("metadata.json", _LIMITS),
        (INDEX_NAME, _INDEX_LIMITS),
    ):
        objects[name] = _read_object(path / name, limits, problems) if name in names else None
    headers, found = _scan_headers(path, [name for name in names if name.endswith(".safetensors")])
    problems.extend(found)
    config, envelope, spec = objects["config.json"], None, objects["spec.json"]
    is_uncovered = False
    if config is not None and is_envelope(config):
        problems.extend(check_envelope(config))
        envelope = open_envelope(config)
        is_uncovered = envelope is None and find_uncovered(None, config) is not None
        config = envelope.config if envelope is not None else None
    if by_hand is not None:
        require_no_spec(path, names)
        tensors = [name for header in headers.values() for name in header.tensors]
        spec = complete_spec(_merge(envelope, by_hand), objects["config.json"] or {}, tensors)
        unknown = list(check_by_hand(spec))
        problems.extend([] if is_uncovered else unknown or check_spec(spec))
    elif "spec.json" in names and spec is not None:
        problems.extend(check_spec(spec))
    elif "spec.json" not in names and envelope is not None and envelope.num_speculative_tokens:
        spec = _merge(envelope, {})
    elif "spec.json" not in names and not is_uncovered:
        problems.append(
            Problem(
                rule="spec.missing",
                file="spec.json",
                found="nothing",
                expected='{"family": "eagle3", "num_speculative_tokens": 3}',
                message="there is no spec.json, so the draft's family and K are unknown",
                fix="Add spec.json with the family and num_speculative_tokens. To judge the folder"
                " as vLLM serves it by hand, give --family and --k.",
            )
        )
    if headers or INDEX_NAME in names:
        problems.extend(check_index(objects[INDEX_NAME], INDEX_NAME in names, headers, names))
    if config is not None and (spec or {}).get("family") == "medusa":
        config = _fill_in_heads(config, headers)
    return FolderScan(
        path=path,
        names=tuple(names),
        spec=spec,
        config=config,
        raw_config=objects["config.json"],
        envelope=envelope,
        metadata=objects["metadata.json"],
        index=objects[INDEX_NAME],
        headers=headers,
        problems=tuple(problems),
        is_by_hand=by_hand is not None,
    )


def _merge(envelope: Envelope | None, by_hand: Mapping[str, Any]) -> dict[str, Any]:
    """What a user gives goes before what an envelope says."""
    if envelope is None:
        return dict(by_hand)
    own = {"family": envelope.family, "num_speculative_tokens": envelope.num_speculative_tokens}
    return {**own, **{key: value for key, value in by_hand.items() if value is not None}}


def _fill_in_heads(config: dict[str, Any], headers: Mapping[str, Header]) -> dict[str, Any]:
    """A Medusa config that does not count its heads: vLLM 0.31.0 takes K of them whatever it says,
    so those in the files are meant."""
    if any("num" in key and "heads" in key for key in config):
        return config
    heads = {
        int(found[1])
        for header in headers.values()
        for name in header.tensors
        if (found := _MEDUSA_HEAD.match(name))
    }
    return {**config, "num_heads": len(heads)} if heads else config


def _scan_headers(path: Path, names: list[str]) -> tuple[dict[str, Header], list[Problem]]:
    """Header by header; all shards together get no more room than one file may take."""
    headers: dict[str, Header] = {}
    problems: list[Problem] = []
    header_bytes = num_tensors = 0
    for name in names[:MAX_FILES]:
        header_bytes += peek_header_bytes(path / name)
        if header_bytes > MAX_HEADER_BYTES or num_tensors > MAX_TENSORS:
            problems.append(
                Problem(
                    rule="st.count",
                    file=show_value(name),
                    found=f"{header_bytes:,} bytes, {num_tensors:,} tensors",
                    expected=f"at most {MAX_HEADER_BYTES:,} bytes and {MAX_TENSORS:,} tensors",
                    message="the headers of all weight files together are too large",
                    fix="Save the draft again; it has a few dozen tensors.",
                )
            )
            break
        header, found = scan_header(path / name)
        problems.extend(found)
        if header is not None:
            headers[name] = header
            num_tensors += len(header.tensors)
        if len(problems) > 200:
            break
    return headers, problems
