"""The one table of contracts: every family with a draft folder, as vLLM 0.31.0 serves it.

Writer, reader and validator ask this table through `contracts.py`; `docs/results/contracts.md`
holds it against vLLM's own modules. Adding a family: keys, rows, sizes, and a row here.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.draft.keys import (
    DFLASH_CONFIG,
    DFLASH_KEYS,
    DRAFT_MODEL_KEYS,
    EAGLE3_KEYS,
    EAGLE3_QWEN3_KEYS,
    EAGLE_CONFIG,
    MEDUSA_KEYS,
    MTP_KEYS,
)
from paceline.draft.layout import (
    DFLASH_ROWS,
    EAGLE3_QWEN3_ROWS,
    EAGLE3_ROWS,
    LLAMA_ROWS,
    MEDUSA_ROWS,
    MTP_ROWS,
    QWEN2_ROWS,
    QWEN3_ROWS,
)
from paceline.draft.rows import Key, Variant
from paceline.draft.sizes import (
    read_dflash,
    read_eagle3,
    read_eagle3_qwen3,
    read_llama,
    read_medusa,
    read_mtp,
    read_qwen2,
    read_qwen3,
)
from paceline.methods import MAX_NUM_SPECULATIVE_TOKENS

__all__ = ["FAMILIES", "Family", "K"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. spec: settings of spec.json beside `family`; variants: none without weights."""

    name: str
    spec: dict[str, Key]
    variants: tuple[Variant, ...] = ()


K = Key(kind="int", required=True, low=1, high=MAX_NUM_SPECULATIVE_TOKENS)
_COUNT = Key(kind="int", low=1, high=1024)
# who proposes: our own class with K tokens on every step, or vLLM's method of that name
_PROPOSER = Key(kind="str", choices=("paceline", "vllm"))
_SHARED_ENDS = "embeddings and output layer, where the folder brings none of its own"
_FOLD = "vLLM 0.31.0 reads it as num_heads: any key with 'num' and 'heads' is folded into that"
_NO_HEAD_OF_ITS_OWN = (
    "vLLM gives an MTP head the target's whole vocabulary; a smaller one cannot be expressed"
)
_QUANTISED_BY_TARGET = (
    "vLLM gives an MTP head the target's quantisation; one of its own cannot be expressed"
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="eagle3",
            spec={"num_speculative_tokens": K},
            variants=(
                Variant(
                    # a plain LlamaForCausalLM gets the prefix Eagle3 from vLLM
                    architectures=(
                        "LlamaForCausalLMEagle3",
                        "Eagle3LlamaForCausalLM",
                        "LlamaForCausalLM",
                        # other names of the same class
                        "Eagle3MiniMaxM2ForCausalLM",
                        "Eagle3Qwen2_5vlForCausalLM",
                        "Eagle3Qwen3vlForCausalLM",
                    ),
                    model_types=("llama",),
                    keys=EAGLE3_KEYS,
                    nested={"eagle_config": EAGLE_CONFIG},
                    read_sizes=read_eagle3,
                    rows=EAGLE3_ROWS,
                    aliases=((r"^layers\.0\.", "midlayer."),),
                    shared=_SHARED_ENDS,
                    summary="one or more Llama layers on the tapped layers of the target",
                ),
                Variant(
                    architectures=("Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM"),
                    model_types=("qwen3",),
                    keys=EAGLE3_QWEN3_KEYS,
                    nested={"eagle_config": EAGLE_CONFIG},
                    read_sizes=read_eagle3_qwen3,
                    rows=EAGLE3_QWEN3_ROWS,
                    aliases=((r"^layers\.0\.", "midlayer."),),
                    shared=_SHARED_ENDS,
                    summary="the same with Qwen3's layer: norms on the heads, no bias on o and MLP",
                ),
            ),
        ),
        Family(
            name="mtp",
            spec={"num_speculative_tokens": K},
            variants=(
                Variant(
                    architectures=("Qwen3_5ForCausalLM",),
                    model_types=("qwen3_5_text",),
                    keys=MTP_KEYS,
                    read_sizes=read_mtp,
                    rows=MTP_ROWS,
                    shared="embeddings, output layer and vocabulary, always",
                    never={
                        "quantization_config": _QUANTISED_BY_TARGET,
                        "draft_vocab_size": _NO_HEAD_OF_ITS_OWN,
                    },
                    summary="the one multi-token-prediction layer of a Qwen3.5 target",
                ),
            ),
        ),
        Family(
            name="medusa",
            spec={"num_speculative_tokens": K},
            variants=(
                Variant(
                    architectures=("MedusaModel",),
                    model_types=("medusa",),
                    keys=MEDUSA_KEYS,
                    read_sizes=read_medusa,
                    rows=MEDUSA_ROWS,
                    aliases=(
                        (r"^medusa_heads\.", ""),
                        (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
                        (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
                    ),
                    never={
                        "num_attention_heads": _FOLD,
                        "num_key_value_heads": _FOLD,
                    },
                    summary="K heads of residual layers on the target's last hidden state",
                ),
            ),
        ),
        Family(
            name="draft_model",
            spec={"num_speculative_tokens": K},
            variants=tuple(
                Variant(
                    architectures=(architecture,),
                    model_types=(model_type,),
                    keys=DRAFT_MODEL_KEYS[model_type],
                    read_sizes=read_sizes,
                    rows=rows,
                    summary=f"a whole small model of the {architecture} kind",
                )
                for architecture, model_type, read_sizes, rows in (
                    ("LlamaForCausalLM", "llama", read_llama, LLAMA_ROWS),
                    ("Qwen3ForCausalLM", "qwen3", read_qwen3, QWEN3_ROWS),
                    ("Qwen2ForCausalLM", "qwen2", read_qwen2, QWEN2_ROWS),
                )
            ),
        ),
        Family(
            name="dflash",
            spec={"num_speculative_tokens": K},
            variants=(
                Variant(
                    architectures=("DFlashDraftModel",),
                    model_types=("qwen3",),
                    keys=DFLASH_KEYS,
                    nested={"dflash_config": DFLASH_CONFIG},
                    read_sizes=read_dflash,
                    rows=DFLASH_ROWS,
                    aliases=(
                        (r"^midlayer\.", "layers.0."),
                        (r"^encoder\.output_norm_enc\.", "hidden_norm."),
                        (r"^encoder\.fc\.", "fc."),
                    ),
                    shared=_SHARED_ENDS,
                    summary="Qwen3 layers that fill K masked slots in one pass",
                ),
            ),
        ),
        Family(
            name="ngram",
            spec={
                "num_speculative_tokens": K,
                "prompt_lookup_min": _COUNT,
                "prompt_lookup_max": _COUNT,
                "proposer": _PROPOSER,
            },
        ),
        Family(
            name="suffix",
            spec={
                "num_speculative_tokens": K,
                "suffix_decoding_max_tree_depth": Key(kind="int", low=1, high=256),
                "suffix_decoding_max_cached_requests": Key(kind="int", low=0, high=2**26),
                "suffix_decoding_max_spec_factor": Key(kind="number", low=0.0, high=64.0),
                "suffix_decoding_min_token_prob": Key(kind="number", low=0.0, high=1.0),
                "cache_tokens": Key(kind="int", low=0, high=2**26),
                "proposer": _PROPOSER,
            },
        ),
    )
}
