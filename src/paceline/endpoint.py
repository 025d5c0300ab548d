"""The records that pass between a served model and whoever measures it, and the Endpoint protocol.

`serve` implements Endpoint; `data` and `eval` are handed one. Nothing here knows vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "Answer",
    "Counters",
    "Endpoint",
    "EngineFacts",
    "MemoryFacts",
    "Request",
    "Sampling",
    "TokenChoice",
]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; then seed, top_p and top_k mean nothing."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids, already through the target's chat template."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished request.

    output_ids: the delivered tokens, end token included when it was sampled.
    finish_reason: "stop" | "length".
    sent_at_s, chunk_times_s, chunk_tokens: one monotonic clock; chunk i arrived at
    chunk_times_s[i] and held chunk_tokens[i] tokens (sum == len(output_ids)).
    per_step_accepted / per_step_drafted: vLLM's detailed per-request speculation record, one entry
    a *drafting* step (steps without a draft are absent), counted before a stop cuts the last step;
    None when the engine runs without speculation.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str
    sent_at_s: float
    chunk_times_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    per_step_accepted: tuple[int, ...] | None = None
    per_step_drafted: tuple[int, ...] | None = None

    @property
    def ttft_ms(self) -> float:
        """Time to first token, milliseconds."""
        return (self.chunk_times_s[0] - self.sent_at_s) * 1000.0

    @property
    def tpot_ms(self) -> float | None:
        """(last - first token time) / (tokens - 1), milliseconds; None for one token."""
        later = len(self.output_ids) - self.chunk_tokens[0]
        if later < 1:
            return None
        # tokens that came with the first chunk cost no time after it
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) * 1000.0 / later


@dataclass(frozen=True, kw_only=True)
class Counters:
    """vLLM's own monotonic speculation counters; subtract two readings to get a run's."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the started engine says it is, to be compared with the plan."""

    vllm_version: str
    platform: str  # "cpu" | "cuda"
    device_name: str
    method: str  # resolved method, "none" without speculation
    num_speculative_tokens: int  # resolved K, 0 without speculation
    runner: str  # "v1" | "v2"
    target_architecture: str
    draft_architecture: str | None
    rejection_sample_method: str | None
    draft_sample_method: str | None
    dtype: str
    max_model_len: int
    prefix_caching: bool
    enforce_eager: bool
    start_s: float  # seconds from process start to ready
    settings: dict[str, Any] = field(default_factory=dict)  # the full planned engine arguments
    proposer: str | None = None  # the class vLLM loaded by name; None for a proposer of its own


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Draft memory in bytes, for one sequence of `context_tokens`.

    weights_bytes: unique device storages of the draft's parameters, less those the target owns
    (packed CPU linears counted by shape); buffers_bytes likewise for buffers.
    kv_bytes, state_bytes: what one sequence takes of the pool in attention and in recurrent groups,
    with the draft minus without, by vLLM's own specs and grouping. On a hybrid target blocks change
    size, so bytes move between the two and one may be negative; their sum is what counts.
    shared: names of draft tensors that live in the target's storages.
    """

    context_tokens: int
    weights_bytes: int
    buffers_bytes: int
    kv_bytes: int
    state_bytes: int
    shared: tuple[str, ...]
    tensors: dict[str, int]  # own tensor name -> bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.buffers_bytes + self.kv_bytes + self.state_bytes


@dataclass(frozen=True, kw_only=True)
class TokenChoice:
    """The target's own view of one next token: top candidates, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Endpoint(Protocol):
    """A served model. `serve.start` gives one; tests may script one."""

    @property
    def facts(self) -> EngineFacts: ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int = 1,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        """Answers in request order; on_answer is called as each finishes. Raises EngineError."""
        ...

    def next_token(self, prefixes: Sequence[Sequence[int]], *, top: int = 2) -> list[TokenChoice]:
        """The `top` likeliest next tokens after each prefix, by the target (one prefill each)."""
        ...

    def text_logprobs(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, ...]]:
        """(prompt ids, answer ids) -> each answer token's log-probability, by the target alone.

        One prefill a text. An answer's own end token counts like any other.
        """
        ...

    def counters(self) -> Counters: ...

    def memory(self, *, context_tokens: int = 16384) -> MemoryFacts | None:
        """Draft memory, or None without a draft model."""
        ...

    def close(self) -> None: ...
