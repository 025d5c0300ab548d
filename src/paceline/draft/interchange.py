"""Drafts of other tools: the speculators envelope and z-lab's DFlash folders, made ours, and back.

Source of the facts: vllm/transformers_utils/configs/speculators/algos.py of 0.31.0, which maps the
same envelopes while it loads; and the published folders. Weights are copied byte for byte.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from paceline.draft.contracts import build_contract
from paceline.draft.envelope import ENVELOPE_KEYS
from paceline.draft.folder import FolderScan, scan_folder
from paceline.draft.keys import LEFTOVERS
from paceline.draft.read import Draft, read_draft
from paceline.draft.sizes import (
    drafts_in_parallel,
    read_aux_layer_ids,
    read_dflash_layer_ids,
    read_mask_token_id,
)
from paceline.draft.table import FAMILIES
from paceline.errors import DraftError
from paceline.problems import require_none, show_value, without_notes
from paceline.records import atomic_folder, write_json
from paceline.safetensors_header import TensorInfo

__all__ = ["export_draft", "import_draft"]

_CHUNK = 2**22
_DEFAULT_K = 3
# Tensors that a trainer keeps for itself: the target's own layers, which no engine reads here.
_TRAINERS_OWN = ("verifier_", "lm_head_full.", "target_model.")


def import_draft(
    source: str | Path,
    out_dir: str | Path,
    *,
    num_speculative_tokens: int | None = None,
    name: str | None = None,
) -> Draft:
    """Reads a draft of speculators (eagle3, peagle, dflash) or a plain EAGLE-3 or DFlash folder.

    Writes config.json in the words of the table, spec.json, metadata.json and the weights, each
    tensor bit for bit. Settings and tensors that vLLM would not read are left out and named in
    metadata.json (`trained.imported`). num_speculative_tokens: None for the folder's own.
    Raises DraftError for a folder that is none of these or does not hold what it says.
    """
    source, out_dir = Path(source), Path(out_dir)
    if not source.is_dir():
        raise DraftError("there is no such folder", where=str(source), expected="a draft folder")
    scan = scan_folder(source)
    require_none(
        without_notes([problem for problem in scan.problems if problem.file != "spec.json"]),
        DraftError,
        folder=str(source),
    )
    if scan.config is None or not scan.headers:
        raise DraftError(
            "there is no config.json with weights",
            where=str(source),
            expected="config.json and *.safetensors",
        )
    form, family, config, own_k = _convert(scan)
    kept = {key: value for key, value in config.items() if key in _keys_of(family, config)}
    k = num_speculative_tokens or own_k or _DEFAULT_K
    tensors, dropped = _select(scan, family, kept)
    trained = {
        "imported": {
            "format": form,
            "dropped_keys": _list_dropped(scan, kept),
            "dropped_tensors": dropped,
        }
    }
    with atomic_folder(out_dir) as folder:
        write_json(folder / "config.json", kept)
        write_json(folder / "spec.json", {"family": family, "num_speculative_tokens": k})
        write_json(folder / "metadata.json", {"name": name or source.name, "trained": trained})
        with (folder / "model.safetensors").open("wb") as file:
            _copy_tensors(file, source, tensors)
        read_draft(folder)
    return read_draft(out_dir)


def _list_dropped(scan: FolderScan, kept: Mapping[str, Any]) -> list[str]:
    """Keys of the source that the new config.json lacks; of an envelope, those that say more than
    how it is wrapped."""
    layers: list[Mapping[str, Any]] = [scan.config or {}]
    if scan.envelope is not None:
        raw = scan.envelope.raw
        layers = [raw["transformer_layer_config"]]
        layers.append({key: 0 for key in raw if key not in ENVELOPE_KEYS})
    named = {key for layer in layers for key, value in layer.items() if value is not None}
    return sorted(named - set(kept))


# What the envelope says beside the layer's own config.
_ENVELOPE_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "mask_token_id",
    "block_size",
)
_NOT_OF_THE_LAYER = (
    *_ENVELOPE_KEYS,
    "eagle_aux_hidden_state_layer_ids",
    "num_aux_hidden_states",
    "num_aux_layers",
    "eagle_config",
    "dflash_config",
    "pard_token",
)


def export_draft(draft: Draft, out_dir: str | Path, *, verifier: str) -> Path:
    """Writes an eagle3 or dflash draft as a speculators folder, each tensor bit for bit.

    verifier: name or path of the target, which vLLM serves when it is given this folder alone.
    Layers are called as speculators calls them (`layers.0.*`). Raises DraftError for another
    family, and for a setting that the envelope cannot carry.
    """
    out_dir = Path(out_dir)
    kind, envelope = _wrap(draft)
    envelope |= {
        "speculators_model_type": kind,
        "transformer_layer_config": {
            key: value for key, value in draft.config.items() if key not in _NOT_OF_THE_LAYER
        },
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": draft.num_speculative_tokens}
            ],
            "verifier": {"name_or_path": verifier},
        },
    }
    tensors = [
        (draft.tensor_files[name], replace(tensor, name=_name_of_speculators(draft, name)))
        for name, tensor in draft.tensors.items()
    ]
    with atomic_folder(out_dir) as folder:
        write_json(folder / "config.json", envelope)
        with (folder / "model.safetensors").open("wb") as file:
            _copy_tensors(file, draft.path, tensors)
    return out_dir


def _name_of_speculators(draft: Draft, name: str) -> str:
    is_first = draft.family == "eagle3" and name.startswith("midlayer.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if is_first else name


def _wrap(draft: Draft) -> tuple[str, dict[str, Any]]:
    config = draft.config
    envelope = {key: config[key] for key in _ENVELOPE_KEYS if config.get(key) is not None}
    if draft.family == "eagle3":
        ids = read_aux_layer_ids(config)
        kind = "peagle" if drafts_in_parallel(config) else "eagle3"
        envelope["norm_before_residual"] = config.get("norm_before_residual", False)
        lost = [key for key in ("fc_norm", "norm_output") if config.get(key) and kind == "peagle"]
        if ids is not None:
            envelope["eagle_aux_hidden_state_layer_ids"] = list(ids)
        if kind == "peagle":
            envelope["mask_token_id"] = read_mask_token_id(config)
    elif draft.family == "dflash":
        ids, kind = read_dflash_layer_ids(config), "dflash"
        inner = config.get("dflash_config") or {}
        lost = [key for key in ("use_swa", "swa_window_size") if inner.get(key)]
        envelope["mask_token_id"] = read_mask_token_id(config)
        envelope["sliding_window_non_causal"] = not inner.get("causal", False)
        envelope["aux_hidden_state_layer_ids"] = list(ids or ())
    else:
        raise DraftError(
            f"family {draft.family} has no speculators form that vLLM maps",
            where=str(draft.path),
            expected="eagle3 or dflash",
        )
    if ids is None or lost:
        raise DraftError(
            f"'{(lost or ['the tapped layers'])[0]}' cannot be said in the envelope",
            where=f"{draft.path}/config.json",
            expected="tapped layers that are stated, and no setting beyond the envelope's",
        )
    return kind, envelope


def _keys_of(family: str, config: Mapping[str, Any]) -> set[str]:
    architectures = config.get("architectures") or [""]
    for variant in FAMILIES[family].variants:
        if architectures[0] in variant.architectures:
            return set(variant.keys) - set(LEFTOVERS)
    raise DraftError(
        f"architecture {show_value(architectures[0])} cannot be read as family {family}",
        where="config.json: architectures",
        expected=", ".join(n for v in FAMILIES[family].variants for n in v.architectures),
    )


def _convert(scan: FolderScan) -> tuple[str, str, dict[str, Any], int | None]:
    """(format, family, plain config, K of the folder)."""
    assert scan.config is not None
    plain = {key: value for key, value in scan.config.items() if value is not None}
    if scan.envelope is not None:
        opened = scan.envelope
        raw = opened.raw
        plain["tie_word_embeddings"] = False
        ids = plain.get("eagle_aux_hidden_state_layer_ids")
        if opened.family == "eagle3" and isinstance(ids, list):
            plain.setdefault("num_aux_hidden_states", len(ids))
        if "pard_token" in plain:
            plain["mask_token_id"] = plain.pop("pard_token")
        dtype = raw.get("dtype") or raw.get("torch_dtype")
        if dtype is not None:
            plain.setdefault("dtype", dtype)
        return f"speculators {opened.kind}", opened.family, plain, opened.num_speculative_tokens
    names = plain.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name == "DFlashDraftModel" or "dflash_config" in plain:
        block = plain.get("block_size")
        k = block - 1 if isinstance(block, int) and block > 1 else None
        return "dflash", "dflash", {**plain, "architectures": ["DFlashDraftModel"]}, k
    if any(name in variant.architectures for variant in FAMILIES["eagle3"].variants):
        return "eagle3", "eagle3", plain, None
    raise DraftError(
        f"architecture {show_value(name)} is no draft that can be imported",
        where=f"{scan.path}/config.json",
        expected="a speculators envelope, a DFlash folder or an EAGLE-3 folder",
        fix="A folder with spec.json is read as it is; a whole model is a draft_model.",
    )


def _select(
    scan: FolderScan, family: str, config: Mapping[str, Any]
) -> tuple[list[tuple[str, TensorInfo]], list[str]]:
    """(file, tensor) to copy, and the names left out. An unknown tensor stays, to be refused."""
    rules = build_contract(family, config)
    kept, dropped = [], []
    for file, header in scan.headers.items():
        for tensor in header.tensors.values():
            rule = rules.tensors.get(rules.canonical(tensor.name))
            is_unread = tensor.name.startswith(_TRAINERS_OWN) or (rule and rule.unread)
            if is_unread:
                dropped.append(tensor.name)
            else:
                kept.append((file, tensor))
    return kept, sorted(dropped)


def _copy_tensors(file: BinaryIO, source: Path, tensors: list[tuple[str, TensorInfo]]) -> None:
    """One safetensors file of the chosen tensors; wide elements first, so that all are aligned."""
    wide = {"I64": 0, "F64": 0, "F32": 1, "I32": 1}
    ordered = sorted(tensors, key=lambda item: (wide.get(item[1].dtype, 2), item[1].name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for _, tensor in ordered:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.num_bytes],
        }
        place += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, tensor in ordered:
        with os.fdopen(os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as origin:
            origin.seek(tensor.start)
            left = tensor.num_bytes
            while left:
                chunk = origin.read(min(left, _CHUNK))
                if not chunk:
                    raise DraftError("the file ended while it was copied", where=f"{source}/{name}")
                file.write(chunk)
                left -= len(chunk)
