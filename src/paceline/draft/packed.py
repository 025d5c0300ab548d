"""Quantised weights as they are stored: integers packed into 32-bit words, and back to numbers.

The compressed-tensors format, as vLLM 0.31.0 unpacks it: value + 2^(bits-1) in ascending bit places
of a little-endian word, along the inputs. Torch is imported where it is used.

Shapes: R rows (outputs), C columns (inputs), G groups a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.draft.contracts import build_contract
from paceline.errors import DraftError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.draft.read import Draft

__all__ = ["dequantize_tensors", "pack_codes", "read_tensors", "unpack_codes"]

_PARTS = ("weight_packed", "weight_scale", "weight_shape")


def pack_codes(codes_RC: Tensor, num_bits: int) -> Tensor:
    """Signed codes, -2^(bits-1) to 2^(bits-1)-1 -> int32 words [R, C * bits / 32]."""
    import torch

    per_word = 32 // num_bits
    rows, columns = codes_RC.shape
    if columns % per_word:
        raise DraftError(f"{columns} inputs of {num_bits} bits do not fill whole 32-bit words")
    shifted = codes_RC.to(torch.int64) + 2 ** (num_bits - 1)
    if int(shifted.min()) < 0 or int(shifted.max()) >= 2**num_bits:
        raise DraftError(f"a code does not fit {num_bits} bits")
    places = torch.arange(per_word, device=codes_RC.device) * num_bits
    words = (shifted.reshape(rows, -1, per_word) << places).sum(dim=-1)
    signed: Tensor = torch.where(words >= 2**31, words - 2**32, words)
    return signed.to(torch.int32)


def unpack_codes(words: Tensor, num_bits: int, num_columns: int) -> Tensor:
    """The inverse of pack_codes: int32 words -> signed codes [R, C] as int8."""
    import torch

    places = torch.arange(32 // num_bits, device=words.device) * num_bits
    wide = words.to(torch.int64) & 0xFFFFFFFF
    codes = (wide[..., None] >> places) & (2**num_bits - 1)
    signed: Tensor = codes.flatten(1)[:, :num_columns] - 2 ** (num_bits - 1)
    return signed.to(torch.int8)


def dequantize_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every packed, int8 or FP8 weight as the plain one it stands for; all else as it is.

    Products are taken in float32 and come back in the scale's dtype. Raises DraftError for a weight
    without its scale, or a scale that does not divide its columns.
    """
    stems = {n.removesuffix("weight_scale") for n in tensors if n.endswith(".weight_scale")}
    lone = {
        n.removesuffix("weight_packed") for n in tensors if n.endswith(".weight_packed")
    } - stems
    if lone:
        raise DraftError(f"tensor '{min(lone)}weight_scale' is missing")
    result = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(_PARTS) and name.removesuffix("weight") not in stems
    }
    for stem in sorted(stems):
        result[f"{stem}weight"] = _dequantize(stem, tensors)
    return result


def read_tensors(draft: Draft) -> dict[str, Tensor]:
    """All tensors of a draft folder under their canonical names, as stored, on the CPU."""
    from safetensors import safe_open

    contract = build_contract(draft.family, draft.config)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(draft.tensor_files.values())):
        with safe_open(str(draft.path / file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                tensors[contract.canonical(name)] = opened.get_tensor(name)
    return tensors


def _dequantize(stem: str, tensors: Mapping[str, Tensor]) -> Tensor:
    import torch

    scale_RG = tensors[f"{stem}weight_scale"]
    words = tensors.get(f"{stem}weight_packed")
    if words is None:
        stored = tensors.get(f"{stem}weight")
        if stored is None:
            raise DraftError(f"tensor '{stem}weight' is missing")
    else:
        num_columns = int(tensors[f"{stem}weight_shape"][1])
        stored = unpack_codes(words, 32 * words.shape[1] // num_columns, num_columns)
    groups = scale_RG.shape[1] if scale_RG.ndim == 2 else 1
    if stored.shape[1] % groups:
        raise DraftError(f"'{stem}weight_scale' has {groups} groups for {stored.shape[1]} inputs")
    wide = stored.to(torch.float32).reshape(stored.shape[0], groups, -1)
    plain = wide * scale_RG.to(torch.float32).reshape(stored.shape[0], groups, 1)
    return plain.reshape(stored.shape).to(scale_RG.dtype)
