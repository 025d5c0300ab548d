"""The sizes of one config as vLLM 0.31.0 takes them: defaults, flags, and where words help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.draft.rows import Sizes, read_size
from paceline.errors import DraftError
from paceline.problems import show_value

__all__ = [
    "drafts_in_parallel",
    "read_aux_layer_ids",
    "read_dflash",
    "read_dflash_layer_ids",
    "read_eagle3",
    "read_eagle3_qwen3",
    "read_llama",
    "read_mask_token_id",
    "read_medusa",
    "read_mtp",
    "read_qwen2",
    "read_qwen3",
]

_QWEN3_HEAD_DIM = 128  # Qwen3Config's own default, whatever the other sizes are
_QWEN3_KV_HEADS = 32


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def read_mask_token_id(config: Mapping[str, Any]) -> Any:
    """The id that vLLM puts into slots to be filled in parallel; None when no key names one."""
    for place, key in (
        (_inner(config, "dflash_config"), "mask_token_id"),
        (config, "mask_token_id"),
        (config, "pard_token"),
    ):
        if place.get(key) is not None:
            return place[key]
    return None


def drafts_in_parallel(config: Mapping[str, Any]) -> bool:
    """True for an EAGLE-3 draft that drafts all K tokens in one pass (P-EAGLE).

    vLLM 0.31.0 does not read this from the config: `parallel_drafting` must be set when serving.
    """
    return "dflash_config" not in config and read_mask_token_id(config) is not None


def read_aux_layer_ids(config: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The ids where vLLM looks for them: top level first, then `eagle_config`; None if nowhere."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or _inner(config, "eagle_config").get(key)
    return tuple(ids) if isinstance(ids, (list, tuple)) and ids else None


def _attention(
    config: Mapping[str, Any], *, is_qwen3: bool
) -> tuple[dict[str, int], dict[str, str]]:
    heads = read_size(config, "num_attention_heads")
    hidden = read_size(config, "hidden_size")
    words: dict[str, str] = {}
    if is_qwen3:
        head_dim = read_size(config, "head_dim", _QWEN3_HEAD_DIM)
        if config.get("head_dim") is None:
            words["head_dim"] = f"head_dim {head_dim}, Qwen3's default"
    else:
        if config.get("head_dim") is None and hidden < heads:
            raise DraftError(
                f"hidden_size {hidden} is smaller than num_attention_heads {heads}",
                where="config.json: num_attention_heads",
                expected="at most hidden_size heads, or an explicit head_dim",
            )
        head_dim = read_size(config, "head_dim", hidden // heads)
        if config.get("head_dim") is None:
            words["head_dim"] = f"hidden_size / heads = {head_dim}"
    absent = "num_key_value_heads" not in config
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": read_size(
            config, "num_key_value_heads", _QWEN3_KV_HEADS if is_qwen3 and absent else heads
        ),
        "head_dim": head_dim,
        "rotary_pairs": max(1, head_dim // 2),
    }, words


def _flags(config: Mapping[str, Any], *names: str) -> set[str]:
    return {name for name in names if config.get(name) is True}


def _decoder(config: Mapping[str, Any], *, is_qwen3: bool) -> tuple[dict[str, int], dict[str, str]]:
    attention, words = _attention(config, is_qwen3=is_qwen3)
    numbers = {
        key: read_size(config, key)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    }
    return {**numbers, **attention}, words


def read_eagle3(config: Mapping[str, Any]) -> Sizes:
    """One EAGLE-3 draft on the Llama layer."""
    return _eagle3(config, is_qwen3=False)


def read_eagle3_qwen3(config: Mapping[str, Any]) -> Sizes:
    """One EAGLE-3 draft on the Qwen3 layer: norms on the heads, another default head_dim."""
    return _eagle3(config, is_qwen3=True)


def _eagle3(config: Mapping[str, Any], *, is_qwen3: bool) -> Sizes:
    numbers, words = _decoder(config, is_qwen3=is_qwen3)
    ids = read_aux_layer_ids(config)
    count_key = "num_aux_hidden_states"
    if is_qwen3 and config.get("num_aux_layers") is not None:
        count_key = "num_aux_layers"
    taps = len(ids) if ids is not None else read_size(config, count_key, 3)
    width = read_size(config, "target_hidden_size", numbers["hidden_size"])
    numbers |= {
        "target_hidden_size": width,
        "draft_vocab_size": read_size(config, "draft_vocab_size", numbers["vocab_size"]),
        "num_taps": taps,
    }
    flags = _flags(config, "attention_bias", "mlp_bias", "fc_norm") | _own_ends(numbers)
    norm_before_fc = config.get("norm_before_fc")
    if _inner(config, "eagle_config").get("norm_before_fc", norm_before_fc) is True:
        flags.add("norm_before_fc")
    if drafts_in_parallel(config):
        flags.add("parallel")
    words["num_taps"] = f"{taps} tapped layers"
    words["target_hidden_size"] = str(width)
    return Sizes(numbers=numbers, flags=frozenset(flags), words=words)


def _own_ends(numbers: Mapping[str, int]) -> set[str]:
    """What a draft must bring because the target's cannot stand in for it."""
    flags = set()
    if numbers["draft_vocab_size"] != numbers["vocab_size"]:
        flags |= {"draft_vocabulary", "own_head"}
    if numbers["hidden_size"] != numbers["target_hidden_size"]:
        flags |= {"own_width", "own_head"}
    return flags


def read_dflash_layer_ids(config: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The tapped layers by EAGLE-3's count (id i: after i layers); None when no key names them.

    DFlash's own `target_layer_ids` count from the layer's index, one less; vLLM adds the one.
    """
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(ids, list) and ids:
        return tuple(ids)
    ids = _inner(config, "dflash_config").get("target_layer_ids")
    if isinstance(ids, list) and ids:
        return tuple(i + 1 if isinstance(i, int) else i for i in ids)
    return None


def read_dflash(config: Mapping[str, Any]) -> Sizes:
    """One DFlash draft. Without layer ids vLLM sizes fc by the draft's own layer count."""
    numbers, words = _decoder(config, is_qwen3=True)
    ids = read_dflash_layer_ids(config)
    taps = numbers["num_hidden_layers"] if ids is None else len(ids)
    width = read_size(config, "target_hidden_size", numbers["hidden_size"])
    numbers |= {
        "target_hidden_size": width,
        "draft_vocab_size": read_size(config, "draft_vocab_size", numbers["vocab_size"]),
        "num_taps": taps,
    }
    words["num_taps"] = f"{taps} tapped layers"
    words["target_hidden_size"] = str(width)
    flags = _flags(config, "attention_bias") | _own_ends(numbers)
    return Sizes(numbers=numbers, flags=frozenset(flags), words=words)


def read_mtp(config: Mapping[str, Any]) -> Sizes:
    """The one layer of a Qwen3.5 head; the output gate doubles its query projection."""
    layers = read_size(config, "mtp_num_hidden_layers", why="State the target's own size.")
    if layers != 1:
        raise DraftError(
            f"'mtp_num_hidden_layers' is {layers}, and vLLM 0.31.0 runs the first layer alone",
            where="config.json: mtp_num_hidden_layers",
            expected="1, a layer that vLLM runs K times",
            fix="Train one layer for all K tokens: the others would be loaded and never run.",
        )
    numbers = {
        key: read_size(config, key, why="State the target's own size.")
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
    }
    has_gate = config.get("attn_output_gate", True) is True
    numbers["query_parts"] = 2 if has_gate else 1
    words = {"query_parts": "2, with the output gate"} if has_gate else {}
    return Sizes(numbers=numbers, words=words)


def _folded(config: Mapping[str, Any], word: str, right: str) -> str:
    """The one key that MedusaConfig takes for `right`: it takes the last of several."""
    keys = [
        key
        for key in config
        if "num" in key and word in key and (word == "heads" or "heads" not in key)
    ]
    if len(keys) > 1:
        raise DraftError(
            f"{len(keys)} keys hold 'num' and '{word}', and vLLM takes the last of them",
            where=f"config.json: {show_value(keys[-1])}",
            expected=f"{right} alone",
            fix="Remove the others.",
        )
    return keys[0] if keys else right


def read_medusa(config: Mapping[str, Any]) -> Sizes:
    """Heads of residual layers, with one output layer for all or one each.

    vLLM 0.31.0 makes a parameter of token_map while it loads, then counts it as not loaded and
    stops: a cut vocabulary cannot be served.
    """
    vocab = read_size(config, "vocab_size")
    if read_size(config, "truncated_vocab_size", vocab) != vocab:
        raise DraftError(
            "a cut vocabulary cannot be served: vLLM 0.31.0 refuses to load any token_map",
            where="config.json: truncated_vocab_size",
            expected=f"{vocab}, or no key",
            fix="Save the head with all rows of the target's vocabulary.",
        )
    layers = _folded(config, "layers", "num_hidden_layers")
    numbers = {
        "hidden_size": read_size(config, "hidden_size"),
        "vocab_size": vocab,
        "num_heads": read_size(config, _folded(config, "heads", "num_heads")),
        "num_hidden_layers": 0 if config.get(layers) == 0 else read_size(config, layers, 1),
    }
    return Sizes(
        numbers=numbers, flags=frozenset(_flags(config, "original_lm_head", "medusa_fc_bias"))
    )


def _whole_model(config: Mapping[str, Any], *, is_qwen3: bool) -> Sizes:
    numbers, words = _decoder(config, is_qwen3=is_qwen3)
    flags = _flags(config, "attention_bias", "mlp_bias")
    if config.get("tie_word_embeddings") is True:
        flags.add("tied")
    return Sizes(numbers=numbers, flags=frozenset(flags), words=words)


def read_llama(config: Mapping[str, Any]) -> Sizes:
    """A whole Llama model as a draft."""
    return _whole_model(config, is_qwen3=False)


def read_qwen2(config: Mapping[str, Any]) -> Sizes:
    """A whole Qwen2 model as a draft: biases on q, k, v; head_dim is never read."""
    return _whole_model({**config, "head_dim": None}, is_qwen3=False)


def read_qwen3(config: Mapping[str, Any]) -> Sizes:
    """A whole Qwen3 model as a draft."""
    return _whole_model(config, is_qwen3=True)
