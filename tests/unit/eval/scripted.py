"""An endpoint that plays written steps and times, with counters that count as vLLM's do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from paceline.endpoint import (
    Answer,
    Counters,
    EngineFacts,
    MemoryFacts,
    Request,
    Sampling,
    TokenChoice,
)
from paceline.eval import EvalPrompt
from paceline.rules import Rules, parse_rules, read_rules

Step = tuple[int, int] | None  # (accepted, drafted), or None for a step without a draft

GREEDY = Sampling(max_tokens=48)


@dataclass(frozen=True, kw_only=True)
class Script:
    """steps yield accepted + 1 tokens each, cut to `num_tokens`; one chunk a step."""

    steps: tuple[Step, ...]
    num_tokens: int
    step_ms: float = 10.0
    ttft_ms: float = 100.0
    tokens: tuple[int, ...] | None = None  # default: 1000, 1001, ...


def build_facts(method: str = "none", k: int = 0, **changes: Any) -> EngineFacts:
    facts = EngineFacts(
        vllm_version="0.31.0",
        platform="cpu",
        device_name="toy",
        method=method,
        num_speculative_tokens=k,
        runner="v2",
        target_architecture="LlamaForCausalLM",
        draft_architecture=None,
        rejection_sample_method="standard" if k else None,
        draft_sample_method="greedy" if k else None,
        dtype="bfloat16",
        max_model_len=2048,
        prefix_caching=False,
        enforce_eager=True,
        start_s=1.0,
    )
    return replace(facts, **changes)


def play(script: Script, request: Request, *, speculates: bool, sent_at_s: float) -> Answer:
    """The answer that vLLM's scheduler would give for these steps."""
    chunks, times = [1], [sent_at_s + script.ttft_ms / 1000]
    for step in script.steps:
        size = min(1 + (step[0] if step else 0), script.num_tokens - sum(chunks))
        assert size >= 1, "a step after the end of the answer"
        chunks.append(size)
        times.append(times[-1] + script.step_ms / 1000)
    assert sum(chunks) == script.num_tokens, "the steps do not fill the answer"
    drafting = [step for step in script.steps if step is not None]
    return Answer(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        output_ids=script.tokens or tuple(range(1000, 1000 + script.num_tokens)),
        finish_reason="stop",
        sent_at_s=sent_at_s,
        chunk_times_s=tuple(times),
        chunk_tokens=tuple(chunks),
        per_step_accepted=tuple(took for took, _ in drafting) if speculates else None,
        per_step_drafted=tuple(offered for _, offered in drafting) if speculates else None,
    )


@dataclass
class ScriptedEndpoint:
    """scripts: request id -> Script, or an exception to raise. log may be shared by arms."""

    facts: EngineFacts
    scripts: Mapping[str, Script | Exception]
    memory_facts: MemoryFacts | None = None
    choices: Mapping[tuple[int, ...], TokenChoice] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    name: str = ""
    prefix: tuple[int | None, int | None] = (0, 0)  # queries and hits added by each request
    clock_s: float = 5.0
    nll_nats: Mapping[tuple[int, ...], float] = field(default_factory=dict)  # answer ids -> mean

    def __post_init__(self) -> None:
        self._counters = Counters(
            num_drafts=1000,  # as if something had run before
            num_draft_tokens=3000,
            num_accepted_tokens=2500,
            num_accepted_tokens_per_pos=(1000, 900, 600)[: self.facts.num_speculative_tokens],
            prefix_cache_queries=None if self.prefix[0] is None else 10,
            prefix_cache_hits=None if self.prefix[1] is None else 10,
        )

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int = 1,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        assert concurrency == 1
        answers = []
        for request in requests:
            self.log.append((self.name, request.request_id))
            script = self.scripts[request.request_id]
            if isinstance(script, Exception):
                raise script
            k = self.facts.num_speculative_tokens
            answer = play(script, request, speculates=k > 0, sent_at_s=self.clock_s)
            self.clock_s += 10
            self._count([step for step in script.steps if step is not None], k)
            answers.append(answer)
        return answers

    def _count(self, steps: list[tuple[int, int]], k: int) -> None:
        c = self._counters
        queries, hits = self.prefix
        self._counters = Counters(
            num_drafts=c.num_drafts + len(steps),
            num_draft_tokens=c.num_draft_tokens + sum(offered for _, offered in steps),
            num_accepted_tokens=c.num_accepted_tokens + sum(took for took, _ in steps),
            num_accepted_tokens_per_pos=tuple(
                c.num_accepted_tokens_per_pos[i] + sum(took > i for took, _ in steps)
                for i in range(k)
            ),
            prefix_cache_queries=None if queries is None else c.prefix_cache_queries + queries,
            prefix_cache_hits=None if hits is None else c.prefix_cache_hits + hits,
        )

    def restart(self) -> None:
        self._counters = Counters(
            num_drafts=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            num_accepted_tokens_per_pos=(0,) * self.facts.num_speculative_tokens,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
        )

    def next_token(self, prefixes: Sequence[Sequence[int]], *, top: int = 2) -> list[TokenChoice]:
        return [self.choices[tuple(prefix)] for prefix in prefixes]

    def text_logprobs(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, ...]]:
        return [(-self.nll_nats.get(tuple(ids), 0.5),) * len(ids) for _, ids in texts]

    def counters(self) -> Counters:
        return self._counters

    def memory(self, *, context_tokens: int = 16384) -> MemoryFacts | None:
        if self.memory_facts is not None:
            assert context_tokens == self.memory_facts.context_tokens
        return self.memory_facts

    def close(self) -> None:
        raise AssertionError("the caller closes endpoints, not eval")


def build_memory(total: int) -> MemoryFacts:
    """total bytes, split into weights, buffers and KV cache."""
    return MemoryFacts(
        context_tokens=16384,
        weights_bytes=total - 300,
        buffers_bytes=100,
        kv_bytes=200,
        state_bytes=0,
        shared=("embed_tokens.weight",),
        tensors={"fc.weight": total - 300},
    )


def build_request(name: str, *, sampling: Sampling = GREEDY) -> Request:
    ids = tuple(name.encode())
    return Request(request_id=name, prompt_ids=ids, sampling=sampling)


def build_prompts(names: Sequence[str]) -> list[EvalPrompt]:
    """'code-1' is of category 'code'."""
    return [EvalPrompt(category=n.split("-")[0], request=build_request(n)) for n in names]


def build_rules(**changes: str) -> Rules:
    """The demo's rules with lines replaced: build_rules(min_tokens_for_tpot="4")."""
    lines = []
    for line in read_rules("demo").text.splitlines():
        key = line.split(" = ")[0]
        lines.append(f"{key} = {changes.pop(key)}" if key in changes else line)
    assert not changes, f"no such keys: {changes}"
    return parse_rules("\n".join(lines) + "\n")


TARGET: Any = SimpleNamespace(
    name="smollm2",
    architecture="LlamaForCausalLM",
    hidden_size=16,
    num_hidden_layers=4,
    vocab_size=64,
    tokenizer_sha256="t" * 64,
    chat_template_sha256="c" * 64,
    weights_fingerprint="w" * 64,
)


def build_draft(name: str, **trained: str) -> Any:
    return SimpleNamespace(
        path=f"drafts/{name}",
        family="eagle3",
        num_speculative_tokens=3,
        num_parameters=1234,
        files_bytes=5000,
        sha256=name * 8,
        metadata={"name": name, "trained": trained} if trained else {},
    )
