"""Repositories of the Hub on this machine: commits of files, some of them kept by LFS."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Repo", "git_hash", "pointer_text"]

ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


def pointer_text(data: bytes) -> bytes:
    sha256 = hashlib.sha256(data).hexdigest()
    head = "version https://git-lfs.github.com/spec/v1"
    return f"{head}\noid sha256:{sha256}\nsize {len(data)}\n".encode()


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """commits: id -> files, each its content and whether LFS keeps it; refs: branch -> commit."""

    repo_id: str
    private: bool = False
    gated: str | bool = False
    readers: set[str] = field(default_factory=set)
    commits: dict[str, dict[str, tuple[bytes, bool]]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    odd_items: list[dict[str, Any]] = field(default_factory=list)  # tree entries no git has

    @property
    def owner(self) -> str:
        return self.repo_id.split("/")[0]

    def commit(self, files: Mapping[str, tuple[bytes, bool]]) -> str:
        state = json.dumps([[n, git_hash(d), k] for n, (d, k) in sorted(files.items())])
        text = f"{self.repo_id} {len(self.commits)} {state}"
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = dict(files)
        self.refs["main"] = name
        return name

    def add(self, files: Mapping[str, bytes]) -> str:
        """One more commit with these files and no others; weights are kept by LFS."""
        kept = {name: (data, name.endswith(".safetensors")) for name, data in files.items()}
        return self.commit({".gitattributes": (ATTRIBUTES, False), **kept})

    @property
    def head(self) -> str:
        return self.refs["main"]
