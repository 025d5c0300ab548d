"""Folders in the speculators format, as its trainer saves them: one layer inside an envelope."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builders import REMOVE, build_config, build_tensors, write_safetensors

__all__ = ["build_envelope", "wrap"]

_OUTSIDE = (
    "architectures",
    "draft_vocab_size",
    "norm_before_residual",
    "eagle_aux_hidden_state_layer_ids",
    "num_aux_hidden_states",
    "dtype",
)
# What transformers writes into a saved layer.
_SAVED = {
    "_name_or_path": "",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def wrap(layer: Mapping[str, Any], kind: str = "eagle3", **changes: Any) -> dict[str, Any]:
    """config.json of an envelope. changes: its own keys; REMOVE drops one."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 16,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/toy"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**_SAVED, **layer},
        "transformers_version": "4.57.1",
        **changes,
    }
    return {key: value for key, value in config.items() if value is not REMOVE}


def build_envelope(folder: Path, *, layer: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """The sound toy draft (builders.py) as such a folder: no spec.json and no metadata.json."""
    plain = build_config()
    inner = {key: value for key, value in plain.items() if key not in _OUTSIDE}
    inner = {key: v for key, v in {**inner, **(layer or {})}.items() if v is not REMOVE}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(wrap(inner, **changes)))
    write_safetensors(folder / "model.safetensors", build_tensors(plain, layer="layers.0"))
    return folder
