"""What a draft will hold, by the shapes in its headers: resident, and at the peak of loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.draft import build_mtp_config
from paceline.draft.mtp import build_mtp_rules, read_mtp_sizes
from paceline.errors import DraftError
from paceline.safetensors_header import DTYPE_BYTES, TensorInfo
from paceline.target import TargetFacts
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding
from paceline.validate.rope import MAX_TABLE_ROWS, count_table_rows

__all__ = ["check_estimate", "check_load"]

_LOAD_FACTOR = 4  # of the contest's file limit
_TABLE_BYTES = 2 + 3 * 4  # an entry of the 16-bit rotary table, and float32 while it is computed
_CAST = ("BF16", "F16", "F32", "F64")
_NOT_HELD = ("t2d",)


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """What keys and values need: layers x heads x (key and value) x 16 bits, for each token."""

    num_layers: int
    num_key_value_heads: int
    head_dim: int

    def count_bytes(self, tokens: int) -> int:
        return self.num_layers * self.num_key_value_heads * self.head_dim * 2 * 2 * tokens


def check_estimate(case: Case) -> Iterator[Finding]:
    """Bytes by shape: 16-bit weights kept after sharing, keys and values of one full sequence."""
    layers = _read_layers(case)
    if layers is None or not case.scan.headers:
        return
    tokens = case.limits.context_tokens
    weights = sum(
        _resident_bytes(name, tensor)
        for tensors in case.scan.tensors_by_file.values()
        for name, tensor in tensors.items()
    )
    cache = layers.count_bytes(tokens)
    hybrid = case.target is not None and case.target.is_hybrid
    more = (
        "; K adds recurrent states on this hybrid target, and blocks change size" if hybrid else ""
    )
    yield finding(
        "mem.est",
        "",
        f"by shape the draft holds {weights:,} bytes of weights and {cache:,} bytes of keys and"
        f" values at {tokens:,} tokens{more}",
        found=f"{weights + cache:,} bytes",
        fix="`paceline forecast` tells all of it, `paceline eval` measures it.",
    )
    baseline = _baseline_bytes(case.target, tokens) if case.baseline_family == "mtp" else None
    if baseline is not None and weights + cache > baseline:
        yield finding(
            "mem.est",
            "",
            f"by shape the draft holds {(weights + cache) / baseline:.2f} times the baseline, the"
            f" target's own MTP head: {weights:,} bytes of weights + {cache:,} of keys and values"
            f" against {baseline:,}",
            where="baseline",
            found=f"{weights + cache:,} bytes",
            expected=f"at most {baseline:,} bytes for a full memory term",
            fix="Make it smaller, or win more acceptance than the memory term costs.",
            severity="warning",
        )


def check_load(case: Case) -> Iterator[Finding]:
    """The most that loading can ask for: the files, their 16-bit copies, the rotary tables."""
    files = case.scan.tensors_by_file
    held = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors.values())
    cast = sum(
        _resident_bytes(name, tensor)
        for tensors in files.values()
        for name, tensor in tensors.items()
    )
    table = _table_bytes(case)
    limit = _LOAD_FACTOR * case.limits.max_files_bytes
    if held + cast + table > limit:
        parts = f"{held:,} of files, {cast:,} of 16-bit weights, {table:,} of rotary tables"
        yield finding(
            "mem.load",
            "",
            f"loading takes up to {held + cast + table:,} bytes: {parts}",
            found=f"{held + cast + table:,} bytes",
            expected=f"at most {limit:,} bytes, {_LOAD_FACTOR} times the file limit",
            fix="Save the weights as bfloat16 and copy the target's positions.",
        )


def _resident_bytes(name: str, tensor: TensorInfo) -> int:
    """Floats in 16 bits, packed weights and maps as stored; vocabulary rows rounded up to 64."""
    if name in _NOT_HELD:
        return 0
    elements = tensor.num_elements
    if name.endswith(("lm_head.weight", "embed_tokens.weight")) and tensor.shape:
        elements = elements // tensor.shape[0] * (-(-tensor.shape[0] // 64) * 64)
    width = 2 if tensor.dtype in _CAST else DTYPE_BYTES[tensor.dtype]
    return elements * width


def _read_layers(case: Case) -> _Layers | None:
    """Layers with keys and values; Medusa has none, an MTP head one whatever the target has."""
    if case.contract is None or case.contract.sizes is None:
        return None
    numbers = case.contract.sizes.numbers
    layers = {"medusa": 0, "mtp": 1}.get(case.family or "", numbers.get("num_hidden_layers", 1))
    return _Layers(
        num_layers=layers,
        num_key_value_heads=numbers.get("num_key_value_heads", 0),
        head_dim=numbers.get("head_dim", 0),
    )


def _baseline_bytes(target: TargetFacts | None, tokens: int) -> int | None:
    """The target's own MTP head, which borrows embeddings and output; None without one."""
    if target is None:
        return None
    try:
        sizes = read_mtp_sizes(build_mtp_config(target))
    except DraftError:
        return None
    rows = build_mtp_rules(sizes).values()
    layers = _Layers(
        num_layers=1, num_key_value_heads=sizes.num_key_value_heads, head_dim=sizes.head_dim
    )
    weights = 0
    for row in rows:
        count = 2
        for size in row.shape:
            count *= size
        weights += count
    return weights + layers.count_bytes(tokens)


def _table_bytes(case: Case) -> int:
    """Rotary tables: one a draft, rows x rotated dimensions, whatever the files hold."""
    positions, layers = case.config.get("max_position_embeddings"), _read_layers(case)
    if layers is None or not isinstance(positions, int) or isinstance(positions, bool):
        return 0
    rows = min(count_table_rows(case, max(positions, 0)), MAX_TABLE_ROWS)
    return int(rows * layers.head_dim * _TABLE_BYTES)
