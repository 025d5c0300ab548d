"""The speculators format: an envelope around one layer's config, as vLLM 0.31.0 opens it.

Source of the facts: vllm/transformers_utils/configs/speculators/{algos,base}.py and
transformers_utils/config.py of 0.31.0. Nothing beside the layer and the keys below reaches a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from paceline.draft.uncovered import SERVED_ENVELOPES
from paceline.problems import Problem, show_value

__all__ = ["ENVELOPE_KEYS", "Envelope", "check_envelope", "is_envelope", "open_envelope"]

_FILE = "config.json"
_LAYER = "transformer_layer_config"
_SETTINGS = "speculators_config"
_KIND = "speculators_model_type"
# kind -> family; those of uncovered.SERVED_ENVELOPES have no contract here
_FAMILIES = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash"}
# kind -> model_type of the layer -> class
_CLASSES = {
    "eagle3": {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"},
    # vLLM's own names for these two are other names of the same classes
    "peagle": {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"},
}
# The layer does not pass through transformers' config classes, so these have no default to fall to.
_STATED = ("rms_norm_eps", "hidden_act")
_STATED_BY_QWEN3 = (*_STATED, "num_key_value_heads", "max_position_embeddings")
_LLAMA_POSITIONS = 8192
_MAX_TOLD = 60  # keys without effect that are named
# What an envelope may say beside its layer: read by vLLM for some kind, or left there by trainers.
ENVELOPE_KEYS = frozenset(
    {
        _KIND,
        _SETTINGS,
        _LAYER,
        "architectures",
        "auto_map",
        "model_type",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
        "transformers_version",
        "speculators_version",
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "embed_requires_grad",
        "has_no_defaults_at_init",
        "eagle_aux_hidden_state_layer_ids",
        "aux_hidden_state_layer_ids",
        "mask_token_id",
        "block_size",
        "max_anchors",
        "sample_from_anchor",
        "sliding_window_non_causal",
    }
)


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """One opened envelope.

    raw: config.json as it stands. config: the plain config of the same model, for the rules of the
    family. num_speculative_tokens: K of the first proposal method; verifier: name or path of the
    target; None where the envelope states none.
    """

    raw: Mapping[str, Any]
    kind: str
    family: str
    config: dict[str, Any]
    num_speculative_tokens: int | None
    verifier: str | None

    def locate(self, key: str) -> str:
        """Where a key of `config` stands in the file."""
        head = key.split(".")[0].split("[")[0]
        inside = head in self.raw[_LAYER] and head not in self.raw
        return f"{_LAYER}.{key}" if inside else key


def is_envelope(config: Mapping[str, Any]) -> bool:
    """Whether vLLM 0.31.0 opens this config.json as an envelope: no other model_type beside it."""
    kind = config.get("model_type")
    return kind == "speculators" or (kind is None and config.get(_SETTINGS) is not None)


def open_envelope(config: Mapping[str, Any]) -> Envelope | None:
    """The envelope, or None for one that vLLM does not open (`check_envelope` says why) or that no
    contract describes."""
    if config.get(_KIND) in SERVED_ENVELOPES:
        return None
    if any(problem.rule == "cfg.spec" for problem in _check_form(config)):
        return None
    kind, layer = config[_KIND], dict(config[_LAYER])
    first = _first_method(config)
    verifier = _inner(config.get(_SETTINGS), "verifier").get("name_or_path")
    k = first.get("speculative_tokens")
    return Envelope(
        raw=config,
        kind=kind,
        family=_FAMILIES[kind],
        config=_unwrap(kind, config, layer),
        num_speculative_tokens=k if _is_count(k) else None,
        verifier=verifier if isinstance(verifier, str) else None,
    )


def _unwrap(kind: str, config: Mapping[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in layer.items() if key != "architectures"}
    plain["draft_vocab_size"] = config.get("draft_vocab_size")
    if config.get("target_hidden_size") is not None:
        plain["target_hidden_size"] = config["target_hidden_size"]
    if kind == "dflash":
        ids = config["aux_hidden_state_layer_ids"]
        plain |= {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "eagle_aux_hidden_state_layer_ids": ids,  # by EAGLE-3's count, one above DFlash's own
            "dflash_config": {
                "mask_token_id": config["mask_token_id"],
                "target_layer_ids": [i - 1 for i in ids],
                "causal": not config.get("sliding_window_non_causal", True),
                "sample_from_anchor": config.get("sample_from_anchor", False),
            },
        }
        if config.get("block_size") is not None:
            plain["block_size"] = config["block_size"]
    else:
        model_type = layer.get("model_type", "llama")
        plain |= {
            "architectures": [_CLASSES[kind][model_type]],
            "model_type": model_type,
            # true for eagle3, and only in an envelope
            "norm_before_residual": config.get("norm_before_residual", kind == "eagle3"),
            "norm_before_fc": config.get("norm_before_fc", False),
        }
        if kind == "eagle3":
            plain |= {key: config.get(key, False) for key in ("fc_norm", "norm_output")}
        else:
            plain["pard_token"] = config["mask_token_id"]
        if config.get("eagle_aux_hidden_state_layer_ids"):
            plain["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
    return _fill_in(plain)


def _fill_in(plain: dict[str, Any]) -> dict[str, Any]:
    """Where a plain config would mean another thing, for want of transformers' config classes: the
    default of positions, Qwen's default head_dim, and a window without use_sliding_window."""
    if plain.get("model_type") == "llama":
        plain.setdefault("max_position_embeddings", _LLAMA_POSITIONS)
    elif plain.get("model_type") == "qwen3":
        hidden, heads = plain.get("hidden_size"), plain.get("num_attention_heads")
        if plain.get("head_dim") is None and _is_count(hidden) and _is_count(heads):
            plain["head_dim"] = max(1, hidden // heads)
        types = plain.get("layer_types")
        if isinstance(types, list) and "sliding_attention" in types:
            plain["use_sliding_window"] = True
    return plain


def check_envelope(config: Mapping[str, Any]) -> list[Problem]:
    """All that is wrong with the envelope itself; `cfg.spec` refuses, the rest only tells. Nothing
    of a kind without a contract."""
    if config.get(_KIND) in SERVED_ENVELOPES:
        return []
    return [*_check_form(config), *_check_unread(config)]


def _problem(where: str, value: Any, message: str, expected: str, fix: str, **more: str) -> Problem:
    return Problem(
        rule=more.get("rule", "cfg.spec"),
        file=_FILE,
        where=where,
        found="nothing" if value is None else show_value(value),
        expected=expected,
        message=message,
        fix=fix,
    )


def _check_form(config: Mapping[str, Any]) -> Iterator[Problem]:
    kind, layer = config.get(_KIND), config.get(_LAYER)
    if not isinstance(kind, str) or kind not in _FAMILIES:
        yield _problem(
            _KIND,
            kind,
            f"speculators' type {show_value(kind)} is none that can be read here",
            ", ".join(_FAMILIES),
            "Name the algorithm of the weights.",
        )
        return
    if not isinstance(layer, dict):
        message = "the envelope holds no layer, and vLLM stops"
        yield _problem(_LAYER, layer, message, "an object", "Export the draft again.")
        return
    inner = layer.get("model_type", "llama")
    if kind in _CLASSES and (not isinstance(inner, str) or inner not in _CLASSES[kind]):
        yield _problem(
            f"{_LAYER}.model_type",
            layer.get("model_type"),
            f"vLLM 0.31.0 builds no such layer for {kind}",
            " or ".join(_CLASSES[kind]),
            "Train with one of these layers.",
        )
    is_llama = kind in _CLASSES and inner == "llama"
    for key in _STATED if is_llama else _STATED_BY_QWEN3:
        if layer.get(key) is None:
            message = f"the layer does not state {key}, and in an envelope vLLM has no default"
            yield _problem(f"{_LAYER}.{key}", None, message, "the value of training", "State it.")
    if "rope_parameters" in layer and "rope_scaling" in layer:
        yield _problem(
            f"{_LAYER}.rope_scaling",
            "null" if layer["rope_scaling"] is None else layer["rope_scaling"],
            "rope_scaling stands beside rope_parameters: in an envelope vLLM goes by the former and"
            " drops the latter without a word, theta and all",
            "one of the two",
            "Remove rope_scaling.",
        )
    if "num_key_value_heads" in layer and layer["num_key_value_heads"] is None:
        message = "is null, and in an envelope vLLM stops at it"
        where = f"{_LAYER}.num_key_value_heads"
        yield _problem(where, None, message, "a whole number", "State it.")
    if kind != "eagle3" and not _is_index(config.get("mask_token_id")):
        yield _problem(
            "mask_token_id",
            config.get("mask_token_id"),
            "'mask_token_id' is missing or no token, and vLLM stops without it",
            "the id of training",
            "State the id that stood in the masked slots.",
        )
    ids = config.get("aux_hidden_state_layer_ids")
    if kind == "dflash" and not (isinstance(ids, list) and ids and all(map(_is_index, ids))):
        yield _problem(
            "aux_hidden_state_layer_ids",
            ids,
            "'aux_hidden_state_layer_ids' is missing or no list of layers, and vLLM stops without"
            " it",
            "a list of layers, the first after one layer",
            "State the layers of training.",
        )
    yield from _check_settings(kind, config)


def _check_settings(kind: str, config: Mapping[str, Any]) -> Iterator[Problem]:
    """What vLLM would take for another thing than is said, or stop at when it serves the folder."""
    settings = config.get(_SETTINGS)
    algorithm = _inner(config, _SETTINGS).get("algorithm")
    if algorithm is not None and algorithm != kind:
        yield _problem(
            f"{_SETTINGS}.algorithm",
            algorithm,
            f"the envelope is of kind {kind} and names another algorithm; vLLM runs the kind",
            kind,
            "Name the algorithm of the weights in both places.",
        )
    kind_of_proposal = _first_method(config).get("proposal_type")
    if kind_of_proposal not in (None, "greedy"):
        yield _problem(
            f"{_SETTINGS}.proposal_methods[0].proposal_type",
            kind_of_proposal,
            "vLLM 0.31.0 does not read how to propose and always drafts one greedy chain",
            "greedy",
            "State greedy, if the draft is meant to be served so.",
        )
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            yield _problem(
                key,
                config[key],
                "vLLM does not see a quantization beside the layer and takes the weights for plain",
                f"inside {_LAYER}",
                f"Move it into {_LAYER}.",
            )
    if settings is not None and not isinstance(settings, dict):
        yield _problem(_SETTINGS, settings, "is not an object", "an object", "Export it again.")


def _check_unread(config: Mapping[str, Any]) -> Iterator[Problem]:
    quantized = ("quantization_config", "compression_config")
    strange = [key for key in config if key not in ENVELOPE_KEYS and key not in quantized]
    for key, value in ((key, config[key]) for key in strange[:_MAX_TOLD]):
        yield _problem(
            show_value(key),
            value,
            f"'{show_value(key)}' has no effect: of an envelope vLLM reads the layer and the"
            " algorithm's own keys",
            "no such key",
            "Remove it, or put what concerns the layer inside it.",
            rule="cfg.unread",
        )
    methods = _inner(config, _SETTINGS).get("proposal_methods")
    if isinstance(methods, list) and len(methods) > 1:
        yield _problem(
            f"{_SETTINGS}.proposal_methods",
            methods,
            f"vLLM reads the first of {len(methods)} proposal methods alone",
            "one method",
            "Leave the others out.",
            rule="cfg.unread",
        )
    tolerance = _first_method(config).get("accept_tolerance")
    if tolerance not in (None, 0):
        yield _problem(
            f"{_SETTINGS}.proposal_methods[0].accept_tolerance",
            tolerance,
            "'accept_tolerance' has no effect: vLLM accepts exactly what the target would say",
            "0",
            "Leave it out.",
            rule="cfg.unread",
        )


def _inner(value: Any, key: str) -> Mapping[str, Any]:
    inner = value.get(key) if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _first_method(config: Mapping[str, Any]) -> Mapping[str, Any]:
    methods = _inner(config, _SETTINGS).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    return first if isinstance(first, Mapping) else {}


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and _is_index(value) and value > 0
