"""Forms that vLLM 0.31.0 serves as a draft and no contract here describes.

Nothing is known of their keys and tensors, so a folder of such a form is neither sound nor wrong:
`validate` says what was not checked, and only a contest refuses it. Names are those of vLLM's
registry and loaders (model_executor/models/registry.py, config/speculative.py, layers/quantization
of 0.31.0); tests/flow/test_settings_of_vllm.py holds them against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.draft.quantized import QUANTIZABLE

__all__ = [
    "SERVED_ARCHITECTURES",
    "SERVED_ENVELOPES",
    "SERVED_METHODS",
    "SERVED_QUANTIZATIONS",
    "find_uncovered",
]

# kinds of speculators envelopes that vLLM opens, beside those with a contract
SERVED_ENVELOPES = ("dflash2", "dspark")
# methods of vLLM with a folder of their own that are no family here
SERVED_METHODS = ("dspark", "eagle")
# family in spec.json -> architectures in config.json. As draft_model: plain decoders; what vLLM
# turns into an MTP head (DeepSeek V3, Qwen3-Next and others) is no draft model, whatever is asked.
SERVED_ARCHITECTURES: dict[str, frozenset[str]] = {
    "eagle3": frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}),
    "dflash": frozenset({"DFlash2DraftModel", "DFlashLagunaForCausalLM", "LiLiCorrDraftModel"}),
    "mtp": frozenset(
        {
            "DeepseekV32ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Ernie4_5_MoeForCausalLM",
            "ExaoneMoeForCausalLM",
            "Glm4MoeForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "LongcatFlashForCausalLM",
            "MiMoForCausalLM",
            "NemotronHForCausalLM",
            "PanguUltraMoEForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
            "Step3p5ForCausalLM",
        }
    ),
    "draft_model": frozenset(
        {
            "ApertusForCausalLM",
            "ArceeForCausalLM",
            "BloomForCausalLM",
            "Cohere2ForCausalLM",
            "CohereForCausalLM",
            "DeepseekForCausalLM",
            "DeepseekV2ForCausalLM",
            "Ernie4_5ForCausalLM",
            "Exaone4ForCausalLM",
            "ExaoneForCausalLM",
            "FalconForCausalLM",
            "GPT2LMHeadModel",
            "GPTJForCausalLM",
            "GPTNeoXForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "GemmaForCausalLM",
            "Glm4ForCausalLM",
            "GlmForCausalLM",
            "GptOssForCausalLM",
            "GraniteForCausalLM",
            "GraniteMoeForCausalLM",
            "InternLM2ForCausalLM",
            "InternLM3ForCausalLM",
            "MiniCPM3ForCausalLM",
            "MiniCPMForCausalLM",
            "Ministral3ForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "NemotronForCausalLM",
            "OPTForCausalLM",
            "OlmoeForCausalLM",
            "OrionForCausalLM",
            "Phi3ForCausalLM",
            "PhiForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "SeedOssForCausalLM",
            "SolarForCausalLM",
            "StableLmForCausalLM",
        }
    ),
}
# stored quantised, by another format than compressed-tensors
SERVED_QUANTIZATIONS = frozenset({"awq", "fp8", "gptq", "modelopt", "modelopt_fp4", "quark"})
_STRATEGIES = ("tensor", "block", "tensor_group")


def find_uncovered(family: str | None, config: Mapping[str, Any]) -> str | None:
    """What of config.json no contract describes though vLLM serves it, in words; else None.

    config: as it stands in the file.
    """
    kind = config.get("speculators_model_type")
    if kind in SERVED_ENVELOPES and config.get("model_type") in (None, "speculators"):
        return f"a speculators envelope of type {kind}"
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(name, str) and name in SERVED_ARCHITECTURES.get(family or "", ()):
        return f"a {family} of architecture {name}"
    settings = config.get("quantization_config")
    if family in QUANTIZABLE and isinstance(settings, Mapping):
        return _find_scheme(settings)
    return None


def _find_scheme(settings: Mapping[str, Any]) -> str | None:
    method = settings.get("quant_method")
    if isinstance(method, str) and method in SERVED_QUANTIZATIONS:
        return f"quantisation by {method}"
    groups = settings.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, Mapping):
        return None
    if settings.get("transform_config") or settings.get("sparsity_config"):
        return None  # vLLM turns the weights by the one and stops at the other
    weights = [
        group["weights"]
        for group in groups.values()
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    if not weights or len(weights) != len(groups):
        return None
    if len(weights) > 1:
        return f"{len(weights)} schemes of quantisation in one draft"
    if weights[0].get("symmetric") is False:
        return "asymmetric quantisation"
    strategy = weights[0].get("strategy")
    return f"quantisation by {strategy}" if strategy in _STRATEGIES else None
