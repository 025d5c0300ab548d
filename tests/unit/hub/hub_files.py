"""The files of a small repository, and what the tests of this folder ask of it."""

from __future__ import annotations

from pathlib import Path

from hub_server import Repo

from paceline.hub import parse_ref
from paceline.hub.names import HubRef

__all__ = ["FILES", "WEIGHTS", "read_all", "ref_of"]

WEIGHTS = bytes(range(256)) * 3000  # 768,000 bytes
FILES = {
    "config.json": b'{"model_type": "llama"}\n',
    "spec.json": b'{"family": "eagle3", "num_speculative_tokens": 3}\n',
    "model.safetensors": WEIGHTS,
}


def ref_of(repo: Repo) -> HubRef:
    return parse_ref(f"{repo.repo_id}@{repo.head}")


def read_all(folder: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in folder.iterdir()}
