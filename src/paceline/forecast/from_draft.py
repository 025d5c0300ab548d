"""A draft folder that is there, as the design it was made to: its bytes and what its score asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.draft import (
    Draft,
    Scheme,
    drafts_in_parallel,
    list_bundled,
    read_dflash_layer_ids,
    read_draft,
    read_eagle3_sizes,
    read_scheme,
    resolve_draft,
)
from paceline.errors import PlanError
from paceline.forecast.design import Design, build_design, read_design
from paceline.forecast.shape import TargetShape
from paceline.forecast.sizes import measure_design

__all__ = ["design_of_draft", "read_design_or_draft"]

_LAYER = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}


def read_design_or_draft(spec: str | Path, shape: TargetShape) -> Design:
    """A DESIGN.toml, a draft folder or a bundled draft's name. Raises like `read_design`,
    `read_draft` and `design_of_draft`."""
    if Path(spec).is_dir() or str(spec) in list_bundled():
        return design_of_draft(read_draft(resolve_draft(str(spec))), shape)
    return read_design(spec, shape)


def design_of_draft(draft: Draft, shape: TargetShape) -> Design:
    """The design of a sound draft folder. Raises PlanError for a folder that no design describes:
    another quantisation, or tensors (biases, further norms) that a design has no key for."""
    config = draft.config
    _require_target(draft, shape)
    table: dict[str, Any] = {
        "family": draft.family,
        "num_speculative_tokens": draft.num_speculative_tokens,
    }
    if draft.family == "medusa":
        table |= {
            "num_layers": config.get("num_hidden_layers", 1),
            "one_head": config.get("original_lm_head") is True,
        }
    elif draft.family != "mtp":
        table |= {key: config[name] for name, key in _LAYER.items() if name in config}
        table |= _read_ends(draft, shape)
        if config.get("sliding_window"):
            table["window"] = config["sliding_window"]
        if (scheme := read_scheme(draft.family, config)) is not None:
            table |= _read_weights(scheme, draft)
    design = build_design(table, shape, where=str(draft.path))
    sizes = measure_design(design, shape, context_tokens=0)
    if sizes.num_parameters != draft.num_parameters:
        raise PlanError(
            f"the folder has {draft.num_parameters:,} parameters, a design of its config.json"
            f" {sizes.num_parameters:,}",
            where=str(draft.path),
            expected="no tensor beside those of its family: no biases, no further norms",
            fix="`paceline eval` measures its memory.",
        )
    return design


def _require_target(draft: Draft, shape: TargetShape) -> None:
    facts = shape.facts
    for key, its in (
        ("vocab_size", facts.vocab_size),
        ("target_hidden_size", facts.hidden_size),
    ):
        stated = draft.config.get(key, its)
        if stated != its:
            raise PlanError(
                f"{key} is {stated:,}: the draft is of another target than {facts.name}",
                where=f"{draft.path}/config.json",
                expected=f"{its:,}",
                fix="Pass the draft's own target as --target.",
            )


def _read_ends(draft: Draft, shape: TargetShape) -> dict[str, Any]:
    """Taps, vocabulary and what is stored rather than shared."""
    if draft.family == "draft_model":
        return {"own_head": not draft.config.get("tie_word_embeddings", False)}
    table: dict[str, Any] = {
        "own_embedding": "embed_tokens.weight" in draft.tensors,
        "own_head": "lm_head.weight" in draft.tensors,
        "draft_vocab_size": draft.config.get("draft_vocab_size") or shape.facts.vocab_size,
    }
    if draft.family == "eagle3":
        table["num_taps"] = read_eagle3_sizes(draft.config, shape.facts).num_aux_hidden_states
        table["parallel"] = drafts_in_parallel(draft.config)
    else:
        table["num_taps"] = len(read_dflash_layer_ids(draft.config) or ())
    return table


def _read_weights(scheme: Scheme, draft: Draft) -> dict[str, Any]:
    names = {("int", 4): "w4a16", ("int", 8): "w8a16", ("float", 8): "fp8"}
    with_int8_inputs = scheme.has_dynamic_inputs and scheme.kind == "int"
    int4_by_rows = scheme.num_bits == 4 and scheme.group_size is None
    in_part = any(name != "lm_head" for name in scheme.ignore) or scheme.has_head
    if with_int8_inputs or int4_by_rows or in_part:
        raise PlanError(
            "a design has no key for this quantisation",
            where=f"{draft.path}/config.json",
            expected="w4a16 in groups, w8a16 or fp8, of every linear layer but the output layer",
            fix="`paceline eval` measures its memory.",
        )
    table: dict[str, Any] = {"weights": names[scheme.kind, scheme.num_bits]}
    return table | ({"group_size": scheme.group_size} if scheme.group_size else {})
