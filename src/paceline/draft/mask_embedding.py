"""`mask_embedding.pt`: the one pickle that vLLM 0.31.0 reads out of a draft folder, for DFlash.

Source: model_executor/models/qwen3_dflash.py and laguna_dflash.py of 0.31.0. `torch.load` with
weights_only turns it into the row of the mask token: a tensor, or a dict with `embedding` and
perhaps `mask_token_id`. Here the file is told from any other pickle without unpickling it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.draft.torch_archive import read_members
from paceline.draft.torch_pickle import SavedTensor, parse_pickle
from paceline.errors import DraftError
from paceline.safetensors_header import DTYPE_BYTES, TensorInfo

__all__ = ["MASK_EMBEDDING", "MAX_MASK_BYTES", "MaskEmbedding", "parse_mask_embedding"]

MASK_EMBEDDING = "mask_embedding.pt"
MAX_MASK_BYTES = 16 * 1024 * 1024
_ROW = "embedding"
_WORDS = {
    "byteorder": re.compile(rb"little"),
    ".format_version": re.compile(rb"1"),
    ".storage_alignment": re.compile(rb"\d{1,6}"),
    ".data/serialization_id": re.compile(rb"\d{1,64}"),
    "version": re.compile(rb"([1-9]|10)\n?"),
}


@dataclass(frozen=True, kw_only=True)
class MaskEmbedding:
    """tensor: where the row lies in the file. mask_token_id: None where the file names none.
    place: the device that it was saved from, to which torch.load brings it back."""

    tensor: TensorInfo
    mask_token_id: Any
    place: str


def parse_mask_embedding(data: bytes) -> MaskEmbedding:
    """The row that vLLM would take from these bytes. Raises DraftError for any other content."""
    members = read_members(data)
    for name, pattern in _WORDS.items():
        if name in members and not pattern.fullmatch(_slice(data, members[name])):
            raise DraftError(f"its member '{name}' is another than torch.save's")
    for name in ("data.pkl", "version"):
        if name not in members:
            raise DraftError(f"it holds no member '{name}'")
    value = parse_pickle(_slice(data, members["data.pkl"]))
    named: Mapping[str, Any] = {_ROW: value} if isinstance(value, SavedTensor) else value
    tensors = [item for item in named.values() if isinstance(item, SavedTensor)]
    for tensor in tensors:
        member = members.get(f"data/{tensor.key}")
        if member is None or len(member) != tensor.num_stored * DTYPE_BYTES[tensor.dtype]:
            raise DraftError("a storage of it has another size than its pickle says")
    stored = {name for name in members if name.startswith("data/")}
    if stored != {f"data/{tensor.key}" for tensor in tensors}:
        raise DraftError("it holds a storage that its pickle does not name")
    row = named.get(_ROW)
    if not isinstance(row, SavedTensor):
        raise DraftError(f"its dict has no tensor '{_ROW}', and vLLM stops without one")
    size = DTYPE_BYTES[row.dtype]
    start = members[f"data/{row.key}"].start + row.start * size
    return MaskEmbedding(
        tensor=TensorInfo(
            name=_ROW,
            dtype=row.dtype,
            shape=row.shape,
            start=start,
            end=start + math.prod(row.shape) * size,
        ),
        mask_token_id=named.get("mask_token_id"),
        place=row.place,
    )


def _slice(data: bytes, member: range) -> bytes:
    return data[member.start : member.stop]
