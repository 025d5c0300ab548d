"""How large a pool a plan states when nobody said: an upper estimate from the config alone.

What counts for a score is measured inside the started engine (inspector.py, pool.py).
"""

from __future__ import annotations

from paceline.draft import Draft
from paceline.methods import METHODS
from paceline.target import TargetFacts

__all__ = ["BLOCK_TOKENS", "kv_bytes_per_token", "size_pool"]

BLOCK_TOKENS = 128  # the CPU backend's block; larger than CUDA's 16
_FLOOR_BYTES = 64 * 2**20
_CPU_CEILING_BYTES = 256 * 2**20
_CUDA_CEILING_BYTES = 16 * 2**30  # 27 B of bf16 and this fit 80 GB


def kv_bytes_per_token(target: TargetFacts, draft: Draft | None) -> int:
    """Bytes of bf16 KV cache a token takes in the target's full attention and the draft's layers.

    Medusa's layers keep nothing.
    An estimate for choosing the pool; what counts for a score is measured by the inspector.
    """
    full = sum("full" in kind for kind in target.layer_types) or target.num_hidden_layers
    total = full * target.num_key_value_heads * target.head_dim * 4
    if draft is not None and METHODS[draft.family].has_weights and draft.family != "medusa":
        config = draft.config
        heads = int(config.get("num_key_value_heads") or target.num_key_value_heads)
        head_dim = int(config.get("head_dim") or target.head_dim)
        # an MTP head is one layer; its config counts the target's
        num_layers = 1 if draft.family == "mtp" else int(config.get("num_hidden_layers") or 1)
        total += num_layers * heads * head_dim * 4
    return total


def size_pool(
    target: TargetFacts,
    draft: Draft | None,
    *,
    device: str,
    max_model_len: int,
    max_num_seqs: int,
    num_speculative_tokens: int,
) -> int:
    """Bytes for max_num_seqs full sequences, up to a ceiling, but always for one."""
    blocks = -(-max_model_len // BLOCK_TOKENS) + 2
    one = blocks * BLOCK_TOKENS * kv_bytes_per_token(target, draft)
    if target.is_hybrid:  # layers of unlike pages pad one another
        one = 4 * one + 2 * _state_bytes(target, num_speculative_tokens)
    ceiling = _CPU_CEILING_BYTES if device == "cpu" else _CUDA_CEILING_BYTES
    return max(min(one * max_num_seqs, ceiling), one, _FLOOR_BYTES)


def _state_bytes(target: TargetFacts, k: int) -> int:
    """Recurrent states of one sequence: one a drafted token, the real one, one in reserve."""
    text = target.config.get("text_config", target.config)
    value_heads, key_heads, value_dim, key_dim, kernel = (
        int(text[f"linear_{name}"])
        for name in (
            "num_value_heads",
            "num_key_heads",
            "value_head_dim",
            "key_head_dim",
            "conv_kernel_dim",
        )
    )
    matrix = value_heads * value_dim * key_dim * 4  # float32 at most
    width = value_heads * value_dim + 2 * key_heads * key_dim
    num_layers = sum("linear" in kind for kind in target.layer_types)
    return (k + 2) * num_layers * (matrix + width * (kernel - 1 + k) * 2)
