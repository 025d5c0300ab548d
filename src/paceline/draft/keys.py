"""Config keys of every family, as transformers' config classes and vLLM 0.31.0 read them.

Source of the facts: transformers' LlamaConfig, Qwen2Config, Qwen3Config and Qwen3_5TextConfig;
vllm/config/speculative.py, transformers_utils/configs/{eagle,medusa}.py and the model files.
"""

from __future__ import annotations

from paceline.draft.rows import Key

__all__ = [
    "DFLASH_CONFIG",
    "DFLASH_KEYS",
    "DRAFT_MODEL_KEYS",
    "EAGLE3_KEYS",
    "EAGLE3_QWEN3_KEYS",
    "EAGLE_CONFIG",
    "LEFTOVERS",
    "MEDUSA_KEYS",
    "MTP_KEYS",
]

_SIZE = Key(kind="int", required=True, low=1, high=2**26, rule="cfg.missing")
_OWN_HEAD = "vLLM 0.31.0 never ties the draft's head to its embeddings"
# zero makes all tokens alike, a negative one turns their order round
_LOGIT_SCALE = Key(kind="number", nullable=False, low=1e-4, high=1e4, default="1")
_TEXT = Key(kind="str")

# Keys that every transformers text config may carry without any effect on a served draft.
_INERT: dict[str, Key] = {
    "bos_token_id": Key(kind="int"),
    "eos_token_id": Key(kind="int or int list"),
    "pad_token_id": Key(kind="int"),
    "transformers_version": _TEXT,
    "use_cache": Key(kind="bool", nullable=False),
    "initializer_range": Key(kind="float", nullable=False),
    "attention_dropout": Key(kind="number", nullable=False),
}
# Left in config.json by exporters; transformers' base class reads them, a served draft does not.
_OF_FORWARD = "it is for transformers' own forward pass, which vLLM does not run"
_OF_SAMPLING = "how to sample is the request's, never the draft's"
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
LEFTOVERS: dict[str, Key] = {
    "_name_or_path": _TEXT,
    "tokenizer_class": _TEXT,
    "id2label": Key(kind="labels"),
    "label2id": Key(kind="object"),
    "problem_type": Key(kind="str", choices=_PROBLEM_TYPES),
    "finetuning_task": _TEXT,
    "task_specific_params": Key(kind="object"),
    "prefix": _TEXT,
    "sep_token_id": Key(kind="int"),
    "is_encoder_decoder": Key(kind="bool", nullable=False, choices=(False,)),
    "is_decoder": Key(kind="bool", unread=_OF_FORWARD, harmless=(False, True)),
    "add_cross_attention": Key(kind="bool", choices=(False,)),
    "tie_encoder_decoder": Key(kind="bool", choices=(False,)),
    "cross_attention_hidden_size": Key(kind="int", unread=_OF_FORWARD),
    "chunk_size_feed_forward": Key(kind="int", nullable=False, unread=_OF_FORWARD, harmless=(0,)),
    "pruned_heads": Key(kind="object", unread=_OF_FORWARD, harmless=({},)),
    "return_dict": Key(kind="bool", unread=_OF_FORWARD, harmless=(False, True)),
    "output_hidden_states": Key(kind="bool", unread=_OF_FORWARD, harmless=(False,)),
    "output_attentions": Key(kind="bool", unread=_OF_FORWARD, harmless=(False,)),
    "torchscript": Key(kind="bool", unread=_OF_FORWARD, harmless=(False,)),
    "use_bfloat16": Key(kind="bool", unread=_OF_FORWARD, harmless=(False,)),
    "max_length": Key(kind="int", unread=_OF_SAMPLING, harmless=(20,)),
    "min_length": Key(kind="int", unread=_OF_SAMPLING, harmless=(0,)),
    "do_sample": Key(kind="bool", unread=_OF_SAMPLING, harmless=(False,)),
    "num_beams": Key(kind="int", unread=_OF_SAMPLING, harmless=(1,)),
    "temperature": Key(kind="number", unread=_OF_SAMPLING, harmless=(1.0,)),
    "top_k": Key(kind="int", unread=_OF_SAMPLING, harmless=(50,)),
    "top_p": Key(kind="number", unread=_OF_SAMPLING, harmless=(1.0,)),
    "repetition_penalty": Key(kind="number", unread=_OF_SAMPLING, harmless=(1.0,)),
}
# Left by targets with experts. No draft class that is known here builds any: told as cfg.moe.
_EXPERTS: dict[str, Key] = {
    **{
        name: Key(kind="int")
        for name in (
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "n_routed_experts",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "decoder_sparse_step",
            "first_k_dense_replace",
        )
    },
    "mlp_only_layers": Key(kind="int list"),
    "norm_topk_prob": Key(kind="bool"),
    "output_router_logits": Key(kind="bool"),
    "router_aux_loss_coef": Key(kind="number"),
}
_BASE: dict[str, Key] = {
    "architectures": Key(kind="str list"),
    "model_type": _TEXT,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
    "hidden_size": _SIZE,
    "vocab_size": _SIZE,
    **_INERT,
    **LEFTOVERS,
}
# One decoder layer of the Llama kind.
_DECODER: dict[str, Key] = {
    **_BASE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _SIZE,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": Key(
        kind="int", low=1, high=2**26, rule="cfg.missing", default="num_attention_heads"
    ),
    "head_dim": Key(
        kind="int",
        low=1,
        high=2**26,
        rule="cfg.missing",
        default="hidden_size / num_attention_heads",
    ),
    "max_position_embeddings": Key(kind="int", nullable=False, default="2048", is_told=True),
    "rms_norm_eps": Key(
        kind="float",
        nullable=False,
        low=1e-12,
        high=1.0,
        rule="cfg.eps",
        default="1e-06",
        is_told=True,
    ),
    "hidden_act": Key(
        kind="str", nullable=False, default="silu", choices=("silu",), rule="cfg.act"
    ),
    "rope_parameters": Key(kind="object", default="plain rotation, theta 10,000"),
    "rope_theta": Key(kind="number"),
    "rope_scaling": Key(kind="object"),
    "partial_rotary_factor": Key(kind="number"),
    "tie_word_embeddings": Key(kind="bool", nullable=False, default="false"),
    "layer_types": Key(kind="str list"),
    "sliding_window": Key(kind="int"),
    "attention_bias": Key(kind="bool", nullable=False, default="false"),
}
_LLAMA: dict[str, Key] = {
    **_DECODER,
    **_EXPERTS,
    "mlp_bias": Key(kind="bool", nullable=False, default="false"),
    "pretraining_tp": Key(kind="int"),
    # left by exporters of Qwen targets
    "use_sliding_window": Key(
        kind="bool",
        unread="vLLM 0.31.0's Llama layer goes by layer_types and sliding_window",
        harmless=(False,),
    ),
    "max_window_layers": Key(kind="int"),
}
# Qwen3Config drops sliding_window unless use_sliding_window is true, and has a head_dim of 128.
_QWEN3: dict[str, Key] = {
    **_DECODER,
    **_EXPERTS,
    "num_key_value_heads": Key(kind="int", low=1, high=2**26, rule="cfg.missing", default="32"),
    "head_dim": Key(
        kind="int", low=1, high=2**26, rule="cfg.missing", default="128", nullable=False
    ),
    "max_position_embeddings": Key(kind="int", nullable=False, default="32768", is_told=True),
    "use_sliding_window": Key(kind="bool", nullable=False, default="false"),
    "max_window_layers": Key(kind="int", nullable=False, default="28"),
    # left by exporters that write every draft in Llama's words
    "pretraining_tp": Key(kind="int"),
    "mlp_bias": Key(kind="bool", unread="Qwen's MLP has no biases", harmless=(False,)),
}
_QWEN2: dict[str, Key] = {
    **{key: rule for key, rule in _QWEN3.items() if key != "attention_bias"},
    "head_dim": Key(
        kind="int",
        low=1,
        high=2**26,
        unread="vLLM 0.31.0's Qwen2 layer always takes hidden_size / num_attention_heads",
    ),
}

_DRAFT_VOCABULARY: dict[str, Key] = {
    "draft_vocab_size": Key(
        kind="int", low=1, high=2**26, rule="cfg.missing", default="vocab_size"
    ),
    "target_hidden_size": Key(
        kind="int", low=1, high=2**26, nullable=False, default="hidden_size", rule="cfg.missing"
    ),
    "logit_scale": _LOGIT_SCALE,
}
_TIE_UNREAD = Key(kind="bool", nullable=False, default="false", unread=_OWN_HEAD, harmless=(False,))
# The draft's own; see quantized.py for what is known.
_QUANTIZATION: dict[str, Key] = {"quantization_config": Key(kind="object")}
_EAGLE3: dict[str, Key] = {
    **_DRAFT_VOCABULARY,
    **_QUANTIZATION,
    "tie_word_embeddings": _TIE_UNREAD,
    "norm_before_residual": Key(kind="bool", default="false"),
    "norm_before_fc": Key(kind="bool", default="false"),
    "fc_norm": Key(kind="bool", default="false"),
    "norm_output": Key(kind="bool", default="false"),
    "eagle_aux_hidden_state_layer_ids": Key(kind="int list"),
    "num_aux_hidden_states": Key(kind="int", low=1, high=64),
    "eagle_config": Key(kind="object"),
    "pard_token": Key(kind="int", low=0, high=2**26),
    "mask_token_id": Key(kind="int", low=0, high=2**26),
}
EAGLE3_KEYS: dict[str, Key] = {**_LLAMA, **_EAGLE3}
EAGLE3_QWEN3_KEYS: dict[str, Key] = {
    **_QWEN3,
    **_EAGLE3,
    "num_aux_layers": Key(kind="int", low=1, high=64),
}
EAGLE_CONFIG: dict[str, Key] = {
    "eagle_aux_hidden_state_layer_ids": Key(kind="int list"),
    "use_aux_hidden_state": Key(kind="bool", nullable=False, choices=(True,), rule="cfg.aux"),
    "norm_before_fc": Key(kind="bool"),
}

_LINEAR = {
    f"linear_{name}": Key(kind="int")
    for name in (
        "conv_kernel_dim",
        "key_head_dim",
        "num_key_heads",
        "num_value_heads",
        "value_head_dim",
    )
}
MTP_KEYS: dict[str, Key] = {
    **{
        key: rule
        for key, rule in _DECODER.items()
        if key not in ("torch_dtype", "rope_theta", "rope_scaling", "sliding_window")
    },
    **_LINEAR,
    "num_key_value_heads": _SIZE,
    "head_dim": _SIZE,
    # vLLM's layer has no biases for it: Qwen3NextAttention reads qkv_bias alone
    "attention_bias": Key(kind="bool", nullable=False, choices=(False,)),
    "attn_output_gate": Key(kind="bool", default="true"),
    "full_attention_interval": Key(kind="int"),
    # of the target's recurrent states, of which the head has none
    "mamba_ssm_dtype": Key(kind="str", choices=("float32", "float16", "bfloat16")),
    "mtp_num_hidden_layers": Key(kind="int", required=True, low=1, high=1, rule="cfg.missing"),
}

MEDUSA_KEYS: dict[str, Key] = {
    **{key: rule for key, rule in _BASE.items() if key not in ("use_cache", "initializer_range")},
    "num_heads": Key(kind="int", low=1, high=64),
    # names of old checkpoints; MedusaConfig folds every such key into num_heads and
    # num_hidden_layers
    "medusa_num_heads": Key(kind="int", low=1, high=64),
    "medusa_num_layers": Key(kind="int", low=0, high=16),
    "num_hidden_layers": Key(kind="int", low=0, high=16, default="1", nullable=False),
    "truncated_vocab_size": Key(
        kind="int", low=1, high=2**26, rule="cfg.missing", default="vocab_size"
    ),
    "original_lm_head": Key(kind="bool", default="false"),
    "medusa_fc_bias": Key(kind="bool", default="false"),
    "logit_scale": _LOGIT_SCALE,
    "max_paths": Key(
        kind="int", unread="vLLM 0.31.0 proposes one path and reads no tree", harmless=(64,)
    ),
    "topk": Key(
        kind="int", unread="vLLM 0.31.0 takes the likeliest token of each head", harmless=(10,)
    ),
    "tie_word_embeddings": Key(kind="bool", unread=_OWN_HEAD, harmless=(False,)),
}

DFLASH_KEYS: dict[str, Key] = {
    **_QWEN3,
    **_DRAFT_VOCABULARY,
    **_QUANTIZATION,
    "tie_word_embeddings": _TIE_UNREAD,
    "block_size": Key(kind="int", low=2, high=256),
    "dflash_config": Key(kind="object"),
    "eagle_aux_hidden_state_layer_ids": Key(kind="int list"),
    "mask_token_id": Key(kind="int", low=0, high=2**26),
    "is_causal": Key(kind="bool"),
    "is_neox_style": Key(kind="bool", default="true", nullable=False),
    "num_target_layers": Key(kind="int"),
}
DFLASH_CONFIG: dict[str, Key] = {
    "mask_token_id": Key(kind="int", low=0, high=2**26),
    "target_layer_ids": Key(kind="int list"),
    "causal": Key(kind="bool"),
    "use_swa": Key(kind="bool", default="false"),
    "swa_window_size": Key(kind="int", low=1, high=2**26),
    "sample_from_anchor": Key(kind="bool", default="false", choices=(False,)),
    "use_aux_hidden_state": Key(kind="bool", nullable=False, choices=(True,), rule="cfg.aux"),
}

DRAFT_MODEL_KEYS: dict[str, dict[str, Key]] = {
    "llama": {
        **_LLAMA,
        **_QUANTIZATION,
        "logit_scale": _LOGIT_SCALE,
    },
    "qwen3": {**_QWEN3, **_QUANTIZATION},
    "qwen2": {**_QWEN2, **_QUANTIZATION},
}
