"""Buckets of prompt length, by the rules' edges."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bucket_names", "find_bucket"]


def bucket_names(edges: Sequence[int]) -> list[str]:
    """ "<= 1024", ..., "> 16384": upper edges in prompt tokens, and what lies beyond the last."""
    return [f"<= {edge}" for edge in edges] + [f"> {edges[-1]}" if edges else "all"]


def find_bucket(num_prompt_tokens: int, edges: Sequence[int]) -> str:
    return bucket_names(edges)[sum(1 for edge in edges if num_prompt_tokens > edge)]
