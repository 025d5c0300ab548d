"""What a model-free draft costs a step, and how good it is, beside arctic-inference's index.

    python bench/proposer_cost.py [--rows DATA_FOLDER] [--keep] [--context 16384]

Light: no engine, one thread. A step is what vLLM pays between two passes of the target: the
proposer takes the new tokens of one request and drafts K = 5. Text is made of phrases whose
frequencies fall like those of words. With --rows, recorded answers of a target (`paceline data
answer`) are replayed as well: tokens a step. arctic-inference is measured where
`arctic_inference.suffix_decoding` can be imported (docs/model-free.md says how it builds without
its CUDA parts), with vLLM's default settings and with a minimum probability of 0, which drafts
more. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.records import build_provenance, write_json
from paceline.serve.proposers.classes import NgramProposer, SuffixProposer

Tokens = npt.NDArray[np.int32]
Step = Callable[[int, int], list[int]]  # (tokens so far, new ones among them) -> draft

K = 5
ANSWER_TOKENS = 256
NUM_STEPS = 600
VOCAB = 32000
BREAK = np.array([-1], dtype=np.int32)


class Phrases:
    """An endless text of 4,000 phrases, 3 to 20 tokens each, drawn by falling frequency."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        made = np.random.default_rng(0)
        odds = 1 / np.arange(1, VOCAB + 1)
        self.phrases = [
            made.choice(VOCAB, size=made.integers(3, 20), p=odds / odds.sum()).astype(np.int32)
            for _ in range(4000)
        ]
        falling = 1 / np.arange(1, 4001) ** 0.7
        self.odds = falling / falling.sum()

    def write(self, num_tokens: int) -> Tokens:
        chosen = self.rng.choice(4000, size=num_tokens // 3 + 1, p=self.odds)
        return np.concatenate([self.phrases[i] for i in chosen])[:num_tokens]


def build_config(longest: int, **settings: int) -> Any:
    return SimpleNamespace(
        additional_config={"paceline": settings},
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        model_config=SimpleNamespace(max_model_len=longest),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def time_steps(step: Step, begin: int) -> dict[str, float]:
    """The first call, which indexes the prompt, and then one call for every few new tokens."""
    rng = np.random.default_rng(7)
    clock = time.thread_time  # other processes on the same cores do not count
    began = clock()
    step(begin, 1)
    first = clock() - began
    spent, count = [], begin
    for _ in range(NUM_STEPS):
        new = int(rng.integers(1, K + 2))
        count += new
        began = clock()
        step(count, new)
        spent.append(clock() - began)
    low, high = np.quantile(spent, [0.5, 0.99]) * 1e6
    return {
        "median_us": round(float(low), 1),
        "mean_us": round(float(np.mean(spent)) * 1e6, 1),
        "p99_us": round(float(high), 1),
        "prompt_ms": round(first * 1e3, 2),
    }


def own_step(proposer: Any, text: Tokens) -> Step:
    table = text[None, :]

    def step(count: int, new: int) -> list[int]:
        draft: list[int] = proposer.propose([[0] * new], np.array([count]), table)[0]
        return draft

    return step


def arctic_step(
    cache: Any, text: Tokens, begin: int, name: int, *, min_token_prob: float = 0.1
) -> Step:
    """The calls that vLLM 0.31.0's own suffix proposer makes of it, with its default settings."""

    def step(count: int, new: int) -> list[int]:
        if name not in cache.active_requests:
            cache.start_request(name, text[: begin - 1])
        cache.add_active_response(name, text[count - new : count])
        draft = cache.speculate(
            name,
            text[count - 24 : count],
            max_spec_tokens=K,
            max_spec_factor=1.0 if min_token_prob else 64.0,
            min_token_prob=min_token_prob,
        )
        tokens: list[int] = draft.token_ids
        return tokens

    return step


def measure_cost(context: int, num_answers: int) -> dict[str, Any]:
    longest = context + NUM_STEPS * (K + 1) + K + 2
    text = Phrases(1).write(longest)
    answers = Phrases(2)
    filled = [answers.write(ANSWER_TOKENS) for _ in range(num_answers)]
    found: dict[str, Any] = {}
    ngram = NgramProposer(build_config(longest, prompt_lookup_min=1, prompt_lookup_max=5))
    found["ngram"] = time_steps(own_step(ngram, text), context)
    for name, cache_tokens in (
        ("suffix, no state", 0),
        ("suffix, cache", num_answers * (ANSWER_TOKENS + 1)),
    ):
        suffix = SuffixProposer(build_config(longest, cache_tokens=cache_tokens))
        if suffix.cache is not None:
            for answer in filled:
                suffix.cache.index.append(np.concatenate((answer, BREAK)))
        found[name] = time_steps(own_step(suffix, text), context)
        one = suffix._rows[0]
        assert one is not None
        found[name]["request_bytes"] = one.nbytes
        found[name]["cache_bytes"] = suffix.cache.index.nbytes if suffix.cache else 0
    if find_spec("arctic_inference") is not None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        for name, kept in (("arctic, no state", 0), ("arctic, cache", num_answers)):
            before = resident_bytes()
            cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=kept)
            for number, answer in enumerate(filled[:kept]):
                cache.start_request(number, answer[:1])
                cache.add_active_response(number, answer)
                cache.stop_request(number)
            filled_bytes = resident_bytes() - before
            found[name] = time_steps(arctic_step(cache, text, context, -1), context)
            found[name]["cache_bytes"] = filled_bytes
            del cache
    return found


def measure_quality(folder: Path) -> dict[str, Any]:
    """Tokens a step when recorded answers are replayed: each drafted token that is right counts."""
    pairs = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        begin, end = row["loss_spans"][0]
        if end > begin + 1:
            pairs.append((begin, np.array(row["input_ids"][:end], dtype=np.int32)))
    longest = max(len(text) for _, text in pairs) + K + 2
    proposers = {
        "ngram 5/5": NgramProposer(build_config(longest, prompt_lookup_min=5, prompt_lookup_max=5)),
        "ngram 1/5": NgramProposer(build_config(longest, prompt_lookup_min=1, prompt_lookup_max=5)),
        "suffix, no state": SuffixProposer(build_config(longest, cache_tokens=0)),
        "suffix, cache": SuffixProposer(build_config(longest, cache_tokens=2**20)),
    }
    makers: dict[str, Callable[[int, int, Tokens], Step]] = {
        name: lambda number, begin, text, own=own: own_step(own, text)
        for name, own in proposers.items()
    }
    if find_spec("arctic_inference") is not None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        for label, kept, lowest in (
            ("arctic, no state", 0, 0.1),
            ("arctic, no state, minimum 0", 0, 0.0),
            ("arctic, cache", 10000, 0.1),
            ("arctic, cache, minimum 0", 10000, 0.0),
        ):
            cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=kept)

            def make(
                number: int, begin: int, text: Tokens, cache: Any = cache, lowest: float = lowest
            ) -> Step:
                for active in list(cache.active_requests):
                    cache.stop_request(active)
                return arctic_step(cache, text, begin + 1, number, min_token_prob=lowest)

            makers[label] = make
    found: dict[str, Any] = {"answers": len(pairs)}
    for name, make in makers.items():
        delivered = steps = 0
        for number, (begin, text) in enumerate(pairs):
            advanced = replay(make(number, begin, text), text, begin)
            delivered, steps = delivered + sum(advanced), steps + len(advanced)
        found[name] = round(delivered / steps, 3)
    return found


def replay(step: Step, text: Tokens, begin: int) -> list[int]:
    """Tokens of each step; text[:begin] is the prompt and text[begin] came with it."""
    count, new, advanced = begin + 1, 1, []
    while count < len(text):
        draft = step(count, new)
        right = 0
        while (
            right < len(draft) and count + right < len(text) and draft[right] == text[count + right]
        ):
            right += 1
        new = min(right + 1, len(text) - count)
        advanced.append(new)
        count += new
    return advanced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=Path, help="a data folder whose answers are replayed")
    parser.add_argument("--keep", action="store_true", help="write bench/results/")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--answers", type=int, default=10000)
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "K": K,
        "context": args.context,
        "cached_answers": args.answers,
        "answer_tokens": ANSWER_TOKENS,
        "cost": measure_cost(args.context, args.answers),
    }
    if args.rows is not None:
        figures["tokens_a_step"] = measure_quality(args.rows)
    print(json.dumps(figures, indent=2))
    if args.keep:
        place = Path(__file__).parent / "results" / "proposer_cost.json"
        write_json(place, {"provenance": build_provenance(), "figures": figures})


if __name__ == "__main__":
    main()
