"""run.loaded: the tensors of the files against those that the engine really holds."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from paceline.serve.run_case import RunCase, Told, finding

__all__ = ["check_loaded", "engine_key"]

_ROW_PADDING = 64  # vLLM rounds the rows of a vocabulary up to a multiple
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "d2t": "draft_id_to_target_id",
}
_PLACES = re.compile(r"model|midlayer|layers|mtp|language_model|\d+")
_ENGINES_OWN = re.compile(
    r"\._(k|v|q|prob)_scale$|cos_sin_cache$|inv_freq$"
    # of DFlash: copies of what was loaded, and a row that only a file of its own would fill
    r"|\._fused_kv_(weight|bias)$|\._k_norm_weights$|(^|\.)mask_embedding$"
)
_NOT_LOADED = ("t2d",)  # vLLM leaves it out on purpose: d2t says the same


def engine_key(name: str) -> str:
    """What a tensor is called in a file and in the engine alike, without its place in the model.

    "midlayer.self_attn.q_proj.weight" and "model.layers.0.self_attn.qkv_proj.weight" are both
    "self_attn.qkv_proj.weight".
    """
    parts = [_FUSED.get(part, part) for part in name.split(".") if not _PLACES.fullmatch(part)]
    return ".".join(parts)


def check_loaded(case: RunCase) -> Iterator[Told]:
    """run.loaded: every tensor of the files is in the engine, and nothing else is."""
    memory = case.seen.memory
    if memory is None:
        return
    filed: Counter[str] = Counter()
    names: dict[str, str] = {}
    slack: Counter[str] = Counter()
    for name, tensor in case.draft.tensors.items():
        if name in _NOT_LOADED:
            continue
        key = engine_key(name)
        names.setdefault(key, name)
        filed[key] += tensor.num_elements * (8 if name == "d2t" else 2)
        if tensor.shape and key in ("lm_head.weight", "embed_tokens.weight"):
            slack[key] += _ROW_PADDING * 2 * tensor.num_elements // max(1, tensor.shape[0])
    held = _sum_by_key(memory.tensors)
    shared = {engine_key(name) for name in memory.shared}
    for key in sorted(filed.keys() | held.keys()):
        for item in _compare(key, names, filed, held, shared, slack):
            yield dataclasses.replace(item, severity=item.severity or case.doubt)


def _sum_by_key(tensors: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, num_bytes in tensors.items():
        if not _ENGINES_OWN.search(name):
            found[engine_key(name)] += num_bytes
    return found


def _compare(
    key: str,
    names: Mapping[str, str],
    filed: Counter[str],
    held: Counter[str],
    shared: set[str],
    slack: Counter[str],
) -> Iterator[Told]:
    name = names.get(key, key)
    if key not in held and key in shared:
        yield finding(
            "run.loaded",
            "model.safetensors",
            f"tensor '{name}' was not used: the engine runs on the target's own",
            where=name,
            found="shared with the target",
            fix="Leave it out of the file; it only costs bytes.",
            severity="warning",
        )
    elif key not in held:
        yield finding(
            "run.loaded",
            "model.safetensors",
            f"tensor '{name}' was not loaded: the engine holds nothing by that name",
            where=name,
            found="not in the engine",
            expected="a parameter of the draft",
            fix="Rename it to what the family's loader reads, or leave it out.",
        )
    elif key not in filed and key not in shared:
        yield finding(
            "run.loaded",
            "model.safetensors",
            f"the engine runs on '{key}' of which no file holds a value",
            where=key,
            found="values that nobody trained",
            expected="a tensor in the file",
            fix="Export it; vLLM 0.31.0 does not miss it.",
        )
    elif key in filed and not filed[key] <= held[key] <= filed[key] + slack[key]:
        yield finding(
            "run.loaded",
            "model.safetensors",
            f"tensor '{name}' takes {held[key]:,} bytes in the engine, {filed[key]:,} by its shape",
            where=name,
            found=f"{held[key]:,} bytes",
            expected=f"{filed[key]:,} bytes",
            fix="A part of it was not loaded, or another size was built; check the config.",
        )
