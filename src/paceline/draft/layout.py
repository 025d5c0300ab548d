"""Tensors of every family, as the modules of vLLM 0.31.0 hold them before q, k, v are stacked.

Source of the facts: vllm/model_executor/models/{llama_eagle3,qwen3_eagle3,qwen3_5_mtp,medusa,
qwen3_dflash,llama,qwen2,qwen3}.py of 0.31.0; held against those modules by the contract flow test.
"""

from __future__ import annotations

from paceline.draft.rows import Row

__all__ = [
    "DFLASH_ROWS",
    "EAGLE3_QWEN3_ROWS",
    "EAGLE3_ROWS",
    "LLAMA_ROWS",
    "MEDUSA_ROWS",
    "MTP_ROWS",
    "QWEN2_ROWS",
    "QWEN3_ROWS",
]

_Q = "num_attention_heads * head_dim"
_KV = "num_key_value_heads * head_dim"
_H = "hidden_size"
_INTER = "intermediate_size"
_LAYERS = "num_hidden_layers"


def _decoder(
    prefix: str,
    *,
    width: str = _H,
    query: str = _Q,
    each: tuple[str, ...] = (),
    first: int = 0,
    qkv_bias: str = "",
    output_bias: str = "",
    mlp_bias: str = "",
    has_head_norms: bool = False,
    has_inv_freq: bool = True,
) -> tuple[Row, ...]:
    """One decoder layer. A bias is named by the flag that gives the layer one, "" for none."""
    rows = [
        Row(name=f"{prefix}.{name}.weight", shape=(_H,), each=each, first=first)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    if has_head_norms:
        rows += [
            Row(
                name=f"{prefix}.self_attn.{name}.weight",
                shape=("head_dim",),
                each=each,
                first=first,
            )
            for name in ("q_norm", "k_norm")
        ]
    for name, shape, bias in (
        ("self_attn.q_proj", (query, width), qkv_bias),
        ("self_attn.k_proj", (_KV, width), qkv_bias),
        ("self_attn.v_proj", (_KV, width), qkv_bias),
        ("self_attn.o_proj", (_H, _Q), output_bias),
        ("mlp.gate_proj", (_INTER, _H), mlp_bias),
        ("mlp.up_proj", (_INTER, _H), mlp_bias),
        ("mlp.down_proj", (_H, _INTER), mlp_bias),
    ):
        rows.append(
            Row(name=f"{prefix}.{name}.weight", shape=shape, each=each, first=first, is_linear=True)
        )
        if bias:
            when = "" if bias == "always" else bias
            rows.append(
                Row(
                    name=f"{prefix}.{name}.bias", shape=shape[:1], each=each, first=first, when=when
                )
            )
    if has_inv_freq:
        rows.append(
            Row(
                name=f"{prefix}.self_attn.rotary_emb.inv_freq",
                shape=("rotary_pairs",),
                each=each,
                first=first,
                needs="never",
                unread="vLLM 0.31.0 works the rotary table out from config.json",
            )
        )
    return tuple(rows)


_LM_HEAD_MISSING = (
    "there is no lm_head.weight; the target's head has {vocab_size} rows of {target_hidden_size}"
    " and cannot stand in for {draft_vocab_size} rows of {hidden_size}"
)
_D2T_MISSING = (
    "draft vocabulary is {draft_vocab_size} of {vocab_size} but there is no d2t, so vLLM would read"
    " draft ids as target ids"
)
# fc, the final norm, and what a draft with its own vocabulary or width must bring.
_ENDS: tuple[Row, ...] = (
    Row(name="fc.weight", shape=(_H, "num_taps * target_hidden_size"), is_linear=True),
    Row(name="norm.weight", shape=(_H,)),
    Row(
        name="lm_head.weight",
        shape=("draft_vocab_size", _H),
        needs="own_head",
        if_missing=_LM_HEAD_MISSING,
    ),
    Row(
        name="embed_tokens.weight",
        shape=("vocab_size", _H),
        needs="own_width",
        if_missing="there is no embed_tokens.weight, and the target's rows have another width",
    ),
    Row(
        name="d2t",
        shape=("draft_vocab_size",),
        dtypes=("I64", "I32", "I16"),
        when="draft_vocabulary",
        if_missing=_D2T_MISSING,
        fix_missing="Save the map as int64 'd2t' with d2t[i] = target id - i.",
    ),
    # read by no engine, written by every trainer: the mask that d2t was made from
    Row(name="t2d", shape=("vocab_size",), dtypes=("BOOL", "U8"), needs="never", is_skipped=True),
)


def _eagle3(layers: tuple[Row, ...]) -> tuple[Row, ...]:
    taps = "num_taps * target_hidden_size"
    return (
        *_ENDS,
        Row(name="input_norm.weight", shape=(taps,), when="norm_before_fc"),
        Row(
            name="fc_norm.{i}.weight",
            shape=("target_hidden_size",),
            each=("num_taps",),
            when="fc_norm",
        ),
        Row(
            name="mask_hidden",
            shape=("1", taps),
            also=((taps,), ("1", "1", taps)),
            when="parallel",
            if_missing="there is no mask_hidden, which a draft for parallel drafting needs",
            fix_missing="Export the trained hidden state of the masked slots.",
        ),
        *layers,
        # vLLM gives every layer a hidden_norm but runs it in the first only
        Row(name="midlayer.hidden_norm.weight", shape=(_H,)),
        Row(
            name="layers.{i}.hidden_norm.weight",
            shape=(_H,),
            each=(_LAYERS,),
            first=1,
            needs="never",
        ),
    )


def _eagle3_layers(
    *, output_bias: str = "", mlp_bias: str = "", has_head_norms: bool = False
) -> tuple[Row, ...]:
    """The first layer reads embeddings and features side by side, the others features alone."""
    return tuple(
        row
        for prefix, width, each, first in (
            ("midlayer", f"2 * {_H}", (), 0),
            ("layers.{i}", _H, (_LAYERS,), 1),
        )
        for row in _decoder(
            prefix,
            width=width,
            each=each,
            first=first,
            qkv_bias="attention_bias",
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            has_head_norms=has_head_norms,
        )
    )


EAGLE3_ROWS = _eagle3(_eagle3_layers(output_bias="attention_bias", mlp_bias="mlp_bias"))
EAGLE3_QWEN3_ROWS = _eagle3(_eagle3_layers(has_head_norms=True))

MTP_ROWS: tuple[Row, ...] = (
    Row(name="mtp.fc.weight", shape=(_H, f"2 * {_H}"), is_linear=True),
    Row(name="mtp.pre_fc_norm_embedding.weight", shape=(_H,)),
    Row(name="mtp.pre_fc_norm_hidden.weight", shape=(_H,)),
    Row(name="mtp.norm.weight", shape=(_H,)),
    *_decoder(
        "mtp.layers.0",
        query=f"{_Q} * query_parts",
        has_head_norms=True,
        has_inv_freq=False,
    ),
    *(
        Row(
            name=name,
            shape=("vocab_size", _H),
            needs="never",
            unread="vLLM 0.31.0 gives an MTP head the target's embeddings and output layer",
        )
        for name in (
            "model.embed_tokens.weight",
            "model.language_model.embed_tokens.weight",
            "lm_head.weight",
        )
    ),
)

MEDUSA_ROWS: tuple[Row, ...] = (
    Row(name="blocks.{i}.layers.{j}.weight", shape=(_H, _H), each=("num_heads", _LAYERS)),
    Row(
        name="blocks.{i}.layers.{j}.bias",
        shape=(_H,),
        each=("num_heads", _LAYERS),
        when="medusa_fc_bias",
    ),
    Row(
        name="lm_head.weight",
        shape=("vocab_size", _H),
        when="original_lm_head",
        if_missing="there is no lm_head.weight; vLLM 0.31.0 never lends Medusa the target's head",
        fix_missing="Save a copy of the target's output layer: sharing it is fine.",
    ),
    Row(
        name="lm_heads.{i}.weight",
        shape=("vocab_size", _H),
        each=("num_heads",),
        when="!original_lm_head",
    ),
    Row(
        name="token_map",
        shape=("vocab_size",),
        dtypes=("I64", "I32"),
        needs="never",
        unread="with the full vocabulary vLLM 0.31.0 skips it",
    ),
)

DFLASH_ROWS: tuple[Row, ...] = (
    *_ENDS,
    Row(name="hidden_norm.weight", shape=(_H,)),
    *_decoder(
        "layers.{i}",
        each=(_LAYERS,),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_head_norms=True,
    ),
)

_NO_HEAD = (
    "there is no lm_head.weight, and tie_word_embeddings is not true: vLLM would serve random"
    " numbers"
)


def _whole_model(layer: tuple[Row, ...]) -> tuple[Row, ...]:
    return (
        Row(name="model.embed_tokens.weight", shape=("vocab_size", _H)),
        Row(name="model.norm.weight", shape=(_H,)),
        Row(
            name="lm_head.weight",
            shape=("vocab_size", _H),
            when="!tied",
            if_missing=_NO_HEAD,
            fix_missing='Save the head, or write "tie_word_embeddings": true.',
        ),
        Row(
            name="lm_head.weight",
            shape=("vocab_size", _H),
            when="tied",
            needs="never",
            unread="with tie_word_embeddings vLLM 0.31.0 reads model.embed_tokens.weight instead",
        ),
        *layer,
    )


LLAMA_ROWS = _whole_model(
    _decoder(
        "model.layers.{i}",
        each=(_LAYERS,),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    )
)
QWEN3_ROWS = _whole_model(
    _decoder("model.layers.{i}", each=(_LAYERS,), qkv_bias="attention_bias", has_head_norms=True)
)
QWEN2_ROWS = _whole_model(_decoder("model.layers.{i}", each=(_LAYERS,), qkv_bias="always"))
