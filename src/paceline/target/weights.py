"""The weight files of a target, by their headers alone: no tensor is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import TargetError
from paceline.records import read_json, sha256_bytes
from paceline.safetensors_header import Header, TensorInfo, read_header

__all__ = ["find_embedding", "fingerprint_weights", "read_weight_headers"]

_MAX_RANK = 5  # a vision tower's patch embedding is a 3-D convolution


def read_weight_headers(folder: Path, *, require_weights: bool) -> dict[str, Header]:
    """Header of each weight file: those that the index names, else every safetensors file.

    Raises TargetError for missing or broken files, tensors that are not where the index says, and,
    with require_weights, a folder without any.
    """
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json(index_path, error=TargetError).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise TargetError("has no weight_map", where=str(index_path))
        names = sorted(set(weight_map.values()))
    else:
        weight_map = {}
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        if not require_weights:
            return {}
        raise TargetError(
            "the target folder has no safetensors weights",
            where=str(folder),
            expected="model.safetensors, or shards with model.safetensors.index.json",
        )
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise TargetError(
            f"weight file {missing[0]} is missing",
            where=str(folder),
            expected=f"the {len(names)} files that the index names",
            fix="Finish the download.",
        )
    # files of the Hub's cache are links to its store: follow them here, the user's own folder
    headers = {
        name: read_header((folder / name).resolve(), error=TargetError, max_rank=_MAX_RANK)
        for name in names
    }
    for tensor, file in weight_map.items():
        if tensor not in headers[file].tensors:
            raise TargetError(
                f"tensor {tensor!r} is not in {file}, where the index says it is",
                where=str(index_path),
                fix="Finish the download, or write the weights again.",
            )
    return headers


def fingerprint_weights(headers: dict[str, Header]) -> str:
    """sha256 over sorted tensor names, dtypes and shapes, and sorted file sizes."""
    tensors = sorted(
        (name, info.dtype, list(info.shape))
        for header in headers.values()
        for name, info in header.tensors.items()
    )
    sizes = sorted(header.file_bytes for header in headers.values())
    return sha256_bytes(json.dumps([tensors, sizes], separators=(",", ":")).encode("utf-8"))


def find_embedding(tensors: dict[str, TensorInfo]) -> TensorInfo | None:
    """The token embedding, or None; the largest where a model has several."""
    found = [info for name, info in tensors.items() if name.endswith("embed_tokens.weight")]
    return max(found, key=lambda info: info.shape[0], default=None)
