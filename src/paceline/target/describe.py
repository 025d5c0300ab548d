"""The facts of a target as lines for `paceline target show`."""

from __future__ import annotations

from itertools import groupby

from paceline.target.facts import TargetFacts

__all__ = ["describe_target"]

_NONE = "none in the folder"


def describe_target(facts: TargetFacts) -> list[tuple[str, str]]:
    """(label, value) lines: everything a draft must match."""
    rope = ", ".join(f"{key} {value}" for key, value in sorted(facts.rope_parameters.items()))
    return [
        ("folder", str(facts.path)),
        ("architecture", f"{facts.architecture} ({facts.model_type})"),
        ("hidden size", f"{facts.hidden_size:,}"),
        ("intermediate size", f"{facts.intermediate_size:,}"),
        ("layers", _describe_layers(facts)),
        (
            "attention",
            f"{facts.num_attention_heads} heads, {facts.num_key_value_heads} key/value heads, "
            f"head size {facts.head_dim}",
        ),
        ("activation", facts.hidden_act),
        ("norm epsilon", f"{facts.rms_norm_eps:g}"),
        ("rope", rope),
        ("positions", f"{facts.max_position_embeddings:,}"),
        ("vocabulary", _describe_vocabulary(facts)),
        (
            "output head",
            "tied to the embeddings" if facts.tie_word_embeddings else "its own weights",
        ),
        ("dtype", facts.dtype or "not stated"),
        ("MTP layers", str(facts.num_mtp_layers)),
        ("tokenizer sha256", facts.tokenizer_sha256 or _NONE),
        ("chat template sha256", facts.chat_template_sha256 or _NONE),
        ("special tokens", _describe_special_tokens(facts)),
        ("weights fingerprint", facts.weights_fingerprint or _NONE),
    ]


def _describe_layers(facts: TargetFacts) -> str:
    kinds = sorted(set(facts.layer_types))
    if len(kinds) == 1:
        return f"{facts.num_hidden_layers} ({kinds[0].replace('_', ' ')})"
    counts = ", ".join(f"{facts.layer_types.count(k)} {k.replace('_', ' ')}" for k in kinds)
    runs = "+".join(f"{len(list(run))}{kind[0]}" for kind, run in groupby(facts.layer_types))
    return f"{facts.num_hidden_layers} ({counts}; order {runs})"


def _describe_vocabulary(facts: TargetFacts) -> str:
    rows = f"{facts.vocab_size:,} embedding rows"
    if facts.num_tokenizer_tokens is None:
        return f"{rows}; no tokenizer in the folder"
    tokens = f"{facts.num_tokenizer_tokens:,} tokens"
    spare = facts.vocab_size - facts.num_tokenizer_tokens
    if spare == 0:
        return f"{rows}, {tokens}, no padding"
    if spare > 0:
        return f"{rows}, {tokens}, {spare:,} rows of padding"
    return f"{rows}, {tokens}: {-spare:,} tokens have no row"


def _describe_special_tokens(facts: TargetFacts) -> str:
    def show(token_id: int | None) -> str:
        return "none" if token_id is None else str(token_id)

    eos = ", ".join(str(token_id) for token_id in facts.eos_token_ids) or "none"
    return f"begin {show(facts.bos_token_id)}; end {eos}; padding {show(facts.pad_token_id)}"
