"""The EAGLE-3 contract: config keys, tensor names and shapes as vLLM 0.31.0 builds them.

Source of the facts: vllm/model_executor/models/llama_eagle3.py and vllm/config/speculative.py of
0.31.0. One decoder layer reads concat(norm(embedding), norm(hidden)), so its q, k, v inputs are
2 x hidden_size wide; `fc` folds the tapped target layers into one hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import DraftError
from paceline.problems import show_value

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = [
    "EAGLE3_ARCHITECTURES",
    "EAGLE3_CONFIG_KEYS",
    "EAGLE3_MODEL_TYPES",
    "Eagle3Sizes",
    "TensorRule",
    "build_eagle3_rules",
    "default_aux_layer_ids",
    "explain_shape",
    "read_aux_layer_ids",
    "read_eagle3_sizes",
]

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
EAGLE3_MODEL_TYPES = ("llama",)
_FLOAT = ("BF16", "F16", "F32")

# Every key of config.json and its type. Keys outside this table are refused.
EAGLE3_CONFIG_KEYS: dict[str, str] = {
    "architectures": "str list",
    "model_type": "str",
    "hidden_size": "int",
    "target_hidden_size": "int",
    "intermediate_size": "int",
    "num_hidden_layers": "int",
    "num_attention_heads": "int",
    "num_key_value_heads": "int",
    "head_dim": "int",
    "vocab_size": "int",
    "draft_vocab_size": "int",
    "max_position_embeddings": "int",
    "rms_norm_eps": "float",
    "hidden_act": "str",
    "rope_parameters": "object",
    "rope_theta": "number",
    "rope_scaling": "object",
    "partial_rotary_factor": "number",
    "tie_word_embeddings": "bool",
    "dtype": "str",
    "torch_dtype": "str",
    "attention_bias": "bool",
    "mlp_bias": "bool",
    "attention_dropout": "number",
    "initializer_range": "float",
    "pretraining_tp": "int",
    "use_cache": "bool",
    "bos_token_id": "int",
    "eos_token_id": "int or int list",
    "pad_token_id": "int",
    "transformers_version": "str",
    "norm_before_residual": "bool",
    "norm_before_fc": "bool",
    "fc_norm": "bool",
    "norm_output": "bool",
    "eagle_aux_hidden_state_layer_ids": "int list",
    "num_aux_hidden_states": "int",
    "eagle_config": "object",
    "layer_types": "str list",
    "sliding_window": "int",
    "logit_scale": "number",
}


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One tensor. rows / columns say in words where the two sizes come from."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = _FLOAT
    required: bool = True
    rows: str = ""
    columns: str = ""
    if_missing: str = ""
    fix_missing: str = ""


@dataclass(frozen=True, kw_only=True)
class Eagle3Sizes:
    """Sizes that vLLM 0.31.0 takes from one EAGLE-3 config, defaults filled in as it does."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    head_dim_is_stated: bool
    vocab_size: int
    draft_vocab_size: int
    num_aux_hidden_states: int
    attention_bias: bool
    mlp_bias: bool
    norm_before_fc: bool
    fc_norm: bool

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**26:
        raise DraftError(
            f"'{key}' is missing" if value is None else f"'{key}' is {show_value(value)}",
            where=f"config.json: {key}",
            expected="a whole number from 1 to 67,108,864",
            fix="vLLM would take the default of Llama-2-7B for a missing size.",
        )
    return value


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """The layers vLLM taps when a config names none: {2, n // 2, n - 3}, sorted, unique."""
    return tuple(sorted({2, num_target_layers // 2, num_target_layers - 3}))


def read_aux_layer_ids(config: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The ids where vLLM looks for them: top level first, then `eagle_config`; None if nowhere."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids and isinstance(config.get("eagle_config"), Mapping):
        ids = config["eagle_config"].get("eagle_aux_hidden_state_layer_ids")
    return tuple(ids) if isinstance(ids, (list, tuple)) and ids else None


def read_eagle3_sizes(config: Mapping[str, Any], target: TargetFacts | None = None) -> Eagle3Sizes:
    """Reads the sizes; raises DraftError for one that is missing or senseless."""
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    vocab = _size(config, "vocab_size")
    ids = read_aux_layer_ids(config)
    if ids is not None:
        num_aux = len(ids)
    elif config.get("num_aux_hidden_states") is not None:
        num_aux = _size(config, "num_aux_hidden_states")
    elif target is not None:
        num_aux = len(default_aux_layer_ids(target.num_hidden_layers))
    else:
        num_aux = 3
    head_dim = config.get("head_dim")
    if head_dim is None and hidden < heads:
        raise DraftError(
            f"hidden_size {hidden} is smaller than num_attention_heads {heads}",
            where="config.json: num_attention_heads",
            expected="at most hidden_size heads, or an explicit head_dim",
        )
    eagle_config = config.get("eagle_config")
    eagle_config = eagle_config if isinstance(eagle_config, Mapping) else {}
    return Eagle3Sizes(
        hidden_size=hidden,
        target_hidden_size=_size(config, "target_hidden_size", hidden),
        intermediate_size=_size(config, "intermediate_size"),
        num_hidden_layers=_size(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        head_dim_is_stated=head_dim is not None,
        vocab_size=vocab,
        draft_vocab_size=_size(config, "draft_vocab_size", vocab),
        num_aux_hidden_states=num_aux,
        attention_bias=config.get("attention_bias") is True,
        mlp_bias=config.get("mlp_bias") is True,
        norm_before_fc=eagle_config.get("norm_before_fc", config.get("norm_before_fc")) is True,
        fc_norm=config.get("fc_norm") is True,
    )


def _layer_rules(sizes: Eagle3Sizes, index: int) -> dict[str, TensorRule]:
    hidden, inter = sizes.hidden_size, sizes.intermediate_size
    query = sizes.num_attention_heads * sizes.head_dim
    key = sizes.num_key_value_heads * sizes.head_dim
    stated = "head_dim" if sizes.head_dim_is_stated else "hidden_size / heads ="
    q_rows = f"{sizes.num_attention_heads} heads x {stated} {sizes.head_dim}"
    k_rows = f"{sizes.num_key_value_heads} key-value heads x {stated} {sizes.head_dim}"
    width = 2 * hidden if index == 0 else hidden
    wide = f"{'2 x ' if index == 0 else ''}hidden_size {hidden}"
    one = f"hidden_size {hidden}"
    many = f"intermediate_size {inter}"
    prefix = "midlayer" if index == 0 else f"layers.{index}"
    matrices = {
        "self_attn.q_proj": ((query, width), q_rows, wide, sizes.attention_bias),
        "self_attn.k_proj": ((key, width), k_rows, wide, sizes.attention_bias),
        "self_attn.v_proj": ((key, width), k_rows, wide, sizes.attention_bias),
        "self_attn.o_proj": ((hidden, query), one, q_rows, sizes.attention_bias),
        "mlp.gate_proj": ((inter, hidden), many, one, sizes.mlp_bias),
        "mlp.up_proj": ((inter, hidden), many, one, sizes.mlp_bias),
        "mlp.down_proj": ((hidden, inter), one, many, sizes.mlp_bias),
    }
    rules = {
        f"{prefix}.{name}.weight": TensorRule(shape=(hidden,), rows=one)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    # vLLM gives every layer a hidden_norm but runs it in the first only.
    rules[f"{prefix}.hidden_norm.weight"] = TensorRule(
        shape=(hidden,), rows=one, required=index == 0
    )
    for name, (shape, rows, columns, has_bias) in matrices.items():
        rules[f"{prefix}.{name}.weight"] = TensorRule(shape=shape, rows=rows, columns=columns)
        if has_bias:
            rules[f"{prefix}.{name}.bias"] = TensorRule(shape=shape[:1], rows=rows)
    return rules


def build_eagle3_rules(sizes: Eagle3Sizes) -> dict[str, TensorRule]:
    """Every tensor of one EAGLE-3 draft by canonical name."""
    hidden, wide = sizes.hidden_size, sizes.num_aux_hidden_states * sizes.target_hidden_size
    own_width = sizes.hidden_size != sizes.target_hidden_size
    small = sizes.has_draft_vocabulary
    taps = f"{sizes.num_aux_hidden_states} tapped layers x {sizes.target_hidden_size}"
    vocab = f"vocab_size {sizes.vocab_size}"
    rules = {
        "fc.weight": TensorRule(shape=(hidden, wide), rows=f"hidden_size {hidden}", columns=taps),
        "norm.weight": TensorRule(shape=(hidden,), rows=f"hidden_size {hidden}"),
        "lm_head.weight": TensorRule(
            shape=(sizes.draft_vocab_size, hidden),
            required=small or own_width,
            rows=f"draft_vocab_size {sizes.draft_vocab_size}",
            columns=f"hidden_size {hidden}",
            if_missing=(
                f"there is no lm_head.weight; the target's head has {sizes.vocab_size} rows of"
                f" {sizes.target_hidden_size} and cannot stand in for"
                f" {sizes.draft_vocab_size} rows of {hidden}"
            ),
        ),
        "embed_tokens.weight": TensorRule(
            shape=(sizes.vocab_size, hidden),
            required=own_width,
            rows=vocab,
            columns=f"hidden_size {hidden}",
            if_missing="there is no embed_tokens.weight, and the target's rows have another width",
        ),
        "t2d": TensorRule(shape=(sizes.vocab_size,), dtypes=("BOOL",), required=False, rows=vocab),
    }
    if small:
        rules["d2t"] = TensorRule(
            shape=(sizes.draft_vocab_size,),
            dtypes=("I64",),
            rows=f"draft_vocab_size {sizes.draft_vocab_size}",
            if_missing=(
                f"draft vocabulary is {sizes.draft_vocab_size} of {sizes.vocab_size} but there is"
                " no d2t, so vLLM would read draft ids as target ids"
            ),
            fix_missing="Save the map as int64 'd2t' with d2t[i] = target id - i.",
        )
    if sizes.norm_before_fc:
        rules["input_norm.weight"] = TensorRule(shape=(wide,), rows=taps)
    if sizes.fc_norm:
        for index in range(sizes.num_aux_hidden_states):
            rules[f"fc_norm.{index}.weight"] = TensorRule(shape=(sizes.target_hidden_size,))
    for index in range(min(sizes.num_hidden_layers, 64)):
        rules.update(_layer_rules(sizes, index))
    return rules


def explain_shape(name: str, shape: tuple[int, ...], rule: TensorRule) -> str:
    """One clause that says which size disagrees with which config key."""
    if len(shape) != len(rule.shape):
        return f"tensor '{name}' has {len(shape)} dimensions, the config implies {len(rule.shape)}"
    clauses = []
    for part, found, wanted, why in zip(
        ("rows", "columns"), shape, rule.shape, (rule.rows, rule.columns), strict=False
    ):
        if found != wanted:
            clauses.append(
                f"{part} {found}, config implies {wanted}" + (f" ({why})" if why else "")
            )
    if name == "fc.weight" and shape[1] != rule.shape[1]:
        num_ids, width = rule.columns.split(" tapped layers x ")
        if shape[1] % int(width) == 0:
            return (
                f"fc expects {shape[1] // int(width)} x {width} inputs, got {num_ids} ids"
                " of tapped target layers"
            )
    return f"tensor '{name}' has {'; '.join(clauses)}"
