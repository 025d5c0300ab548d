"""Would a suffix draft in place of a trained one, on single steps, deliver more? By replay.

    python bench/mixture_replay.py serve smollm2 smollm2-eagle3 --out TEXTS.jsonl [--prompts 48]
    python bench/mixture_replay.py weigh smollm2 smollm2-eagle3 --texts TEXTS.jsonl
    python bench/mixture_replay.py weigh pocket pocket-eagle3 --run RUN [--arm candidate]

`serve` answers held-out prompts with the draft on vLLM (a run folder of `paceline eval` has the
same). `weigh` lets the trainer's own forward, which agrees with what was served, draft from every
place of every answer, so that it is known what the draft gives wherever a mixture would call it,
not only where its own steps began; replays serve/proposers/suffix.py over the same texts; and walks
each answer under rules: the draft alone, suffix alone, the better of both at each step (it knows
the future), and suffix where its longest match has at least m tokens and the winner at least a
share s of the votes, else the draft. (m, s) is chosen on every other prompt and judged on the rest,
and the other way round. Figures are added to bench/results/mixture-replay.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from paceline.acceptance import accept_greedy
from paceline.cli.arms import build_arm_plan
from paceline.data import build_requests, read_prompts
from paceline.draft import read_draft, read_native_draft, resolve_draft
from paceline.endpoint import Answer, Sampling
from paceline.eval.figures import tau_figure
from paceline.eval.pairing import build_pairing
from paceline.eval.statistics import half_width
from paceline.records import build_provenance, read_json, write_json
from paceline.serve import start
from paceline.serve.proposers.index import BREAK, MAX_DEPTH, TokenIndex
from paceline.serve.proposers.suffix import propose_suffix
from paceline.target import read_target
from paceline.train.families.table import FAMILIES
from paceline.train.features import load_frozen_target
from paceline.train.replay import load_draft_module, propose

MATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHARES = (0.0, 0.5, 0.7, 0.9, 0.999)
CACHE_TOKENS = 65536
RESULTS = Path(__file__).resolve().parent / "results" / "mixture-replay.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    steps = parser.add_subparsers(required=True)
    serving, weighing = steps.add_parser("serve"), steps.add_parser("weigh")
    for step, run in ((serving, serve), (weighing, weigh)):
        step.set_defaults(run=run)
        step.add_argument("target")
        step.add_argument("draft", help="native, a bundled draft or a folder")
    serving.add_argument("--out", type=Path, required=True)
    serving.add_argument("--prompts", type=int, default=48)
    serving.add_argument("--max-tokens", type=int, default=96)
    serving.add_argument("--at-once", type=int, default=8)
    given = weighing.add_mutually_exclusive_group(required=True)
    given.add_argument("--texts", type=Path)
    given.add_argument("--run", type=Path, dest="folder", help="a run folder")
    weighing.add_argument("--long-k", type=int, default=8, help="Drafts of this length as well.")
    weighing.add_argument("--every", type=int, default=1, help="Each so-many-th answer only.")
    weighing.add_argument("--arm", default="candidate")
    options = parser.parse_args()
    options.run(options)


def serve(options: argparse.Namespace) -> None:
    """One line a prompt, written as it is answered; what is there is not asked again."""
    target = read_target(options.target)
    every = read_prompts("held-out").prompts
    prompts = every[:: len(every) // options.prompts][: options.prompts]
    sampling = Sampling(max_tokens=options.max_tokens)
    thinking: Literal["off", "none"] = "off" if target.is_hybrid else "none"
    requests = build_requests(prompts, target, sampling, thinking=thinking)
    done = {row["id"] for row in read_texts(options.out)} if options.out.exists() else set()
    categories = {
        request.request_id: prompt.category
        for prompt, request in zip(prompts, requests, strict=True)
    }
    longest = max(len(request.prompt_ids) for request in requests) + options.max_tokens
    plan = build_arm_plan(target, options.draft, max_model_len=longest + 8, max_num_seqs=8)
    log = options.out.with_suffix(".log")
    with start(plan, log_path=log) as endpoint, options.out.open("a") as file:

        def note(answer: Answer) -> None:
            row = {
                "id": answer.request_id,
                "category": categories[answer.request_id],
                "prompt_ids": answer.prompt_ids,
                "output_ids": answer.output_ids,
                "per_step_accepted": answer.per_step_accepted,
            }
            file.write(json.dumps(row) + "\n")
            file.flush()

        left = [request for request in requests if request.request_id not in done]
        endpoint.generate(left, concurrency=options.at_once, on_answer=note)


def read_texts(path: Path, arm: str | None = None) -> list[dict[str, Any]]:
    """Rows of `serve`, or an arm's answers in a run folder's requests.jsonl."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if arm is None or (row["kind"], row.get("arm")) == ("answer", arm)]


@dataclass(frozen=True, kw_only=True)
class Everywhere:
    """right: K -> for each answer, right drafted tokens from each place on. own_k: the draft's."""

    right: dict[int, list[list[int]]]
    own_k: int
    agrees: dict[str, Any]


def draft_everywhere(
    target_name: str, name: str, rows: Sequence[Mapping[str, Any]], long_k: int
) -> Everywhere:
    """What the draft gives from every place, and how far serving agrees with the replay."""
    target = read_target(target_name)
    draft = read_native_draft(target, num_speculative_tokens=3) if name == "native" else None
    draft = draft or read_draft(resolve_draft(name))
    module, frozen = (
        load_draft_module(draft),
        load_frozen_target(target, device="cpu", dtype=torch.bfloat16),
    )
    own_k = draft.num_speculative_tokens
    right: dict[int, list[list[int]]] = {}
    for k in sorted({own_k, long_k}):
        right[k] = []
        for row in rows:
            ids = row["output_ids"]
            first = len(row["prompt_ids"]) - 1  # the step after i tokens has base first + i - 1
            proposed, _ = propose(
                module,
                frozen,
                ids=[*row["prompt_ids"], *ids],
                bases=range(first, first + len(ids) - 1),
                aux_layer_ids=FAMILIES[draft.family].tapped_layers(draft.config),
                num_speculative_tokens=k,
            )
            right[k].append([accept_greedy(one, ids[i:]) for i, one in enumerate(proposed, 1)])
    return Everywhere(right=right, own_k=own_k, agrees=count_agreeing(rows, right[own_k]))


def count_agreeing(rows: Sequence[Mapping[str, Any]], right: Sequence[list[int]]) -> dict[str, int]:
    """Served steps, and those of which the replay says the same, as far as they were delivered."""
    steps = agree = 0
    for row, found in zip(rows, right, strict=True):
        place, count = 1, len(row["output_ids"])
        for took in row["per_step_accepted"]:
            if place < count:
                steps += 1
                agree += min(took, count - place) == found[place - 1]
            place += took + 1
    return {"steps": steps, "agree": agree}


@dataclass(frozen=True, kw_only=True)
class Text:
    """An answer of n tokens; entry i - 1 of each list is about the step after i of them.

    draft, suffix: drafted tokens that are right. length: of the longest match, 0 for none.
    share: of the votes, for the first token.
    """

    id: str
    category: str
    num_tokens: int
    draft: list[int]
    suffix: list[int]
    length: list[int]
    share: list[float]


Rule = Callable[[Text, int], tuple[int, bool]]  # -> (accepted, whether suffix drafted)


def weigh(options: argparse.Namespace) -> None:
    if options.texts is not None:
        rows = read_texts(options.texts)
    else:
        rows = read_texts(options.folder / "requests.jsonl", options.arm)
    rows = sorted(rows, key=lambda row: str(row["id"]))[:: options.every]
    long_k: int = options.long_k
    drafted = draft_everywhere(options.target, options.draft, rows, long_k)
    own_k = drafted.own_k
    found = {
        "prompts": len(rows),
        "tokens": sum(len(row["output_ids"]) for row in rows),
        "served_tau": served_tau(rows),
        "replay": drafted.agrees,
        "mixtures": {
            f"draft K = {k}, suffix K = {other}{', cache' if cached else ''}": weigh_one(
                rows, drafted.right[k], other, cached
            )
            for k, other in dict.fromkeys([(own_k, own_k), (own_k, long_k), (long_k, long_k)])
            for cached in (False, True)
        },
    }
    name = f"{options.target}, {options.draft}"
    show(name, found)
    figures = read_json(RESULTS)["figures"] if RESULTS.exists() else {}
    write_json(RESULTS, {"provenance": build_provenance(), "figures": {**figures, name: found}})


def served_tau(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of the answers as they were served, one at a time."""
    delivered = sum(len(row["output_ids"]) - 1 for row in rows)
    return delivered / sum(len(row["per_step_accepted"]) for row in rows)


def weigh_one(
    rows: Sequence[Mapping[str, Any]], right: Sequence[list[int]], k: int, cached: bool
) -> dict[str, Any]:
    texts = replay_suffix(rows, right, k, cached)
    choices = list(itertools.product(MATCHES, SHARES))
    halves = [texts[0::2], texts[1::2]]
    chosen = [
        max(choices, key=lambda one: tau([walk(t, rule(*one)) for t in half])) for half in halves
    ]
    by_id = {
        text.id: one for half, one in zip(halves, reversed(chosen), strict=True) for text in half
    }
    arms: dict[str, list[dict[str, Any]]] = {
        "draft alone": [walk(text, draft_alone) for text in texts],
        "suffix alone": [walk(text, suffix_alone) for text in texts],
        "the better of both": [walk(text, better) for text in texts],
        "rule": [walk(text, rule(*by_id[text.id])) for text in texts],
        "rule, best on these prompts": [
            walk(
                text, rule(*max(choices, key=lambda one: tau([walk(t, rule(*one)) for t in texts])))
            )
            for text in texts
        ],
    }
    base = arms["draft alone"]
    return {"chosen": chosen, "arms": {name: describe(base, arm) for name, arm in arms.items()}}


def replay_suffix(
    rows: Sequence[Mapping[str, Any]], right: Sequence[list[int]], k: int, cached: bool
) -> list[Text]:
    """Answers in their order: with a cache each finds those before it."""
    cache = TokenIndex(CACHE_TOKENS) if cached else None
    texts = []
    for row, drafted in zip(rows, right, strict=True):
        prompt, answer = row["prompt_ids"], row["output_ids"]
        own = TokenIndex(1 << (len(prompt) + len(answer) + 64).bit_length())
        own.append(np.array([*prompt, answer[0]], dtype=np.int32))
        indexes = [own] if cache is None else [own, cache]
        suffix, length, share = [], [], []
        for place in range(1, len(answer)):
            context = [*prompt, *answer[:place]][-MAX_DEPTH:]
            draft = propose_suffix(context, k, indexes)
            suffix.append(accept_greedy(draft, answer[place:]))
            found = weigh_votes(context, indexes)
            length.append(found[0])
            share.append(found[1])
            own.append(np.array(answer[place : place + 1], dtype=np.int32))
        if cache is not None:
            cache.append(np.array([*answer, BREAK], dtype=np.int32))
        texts.append(
            Text(
                id=row["id"],
                category=row["category"],
                num_tokens=len(answer),
                draft=drafted,
                suffix=suffix,
                length=length,
                share=share,
            )
        )
    return texts


def weigh_votes(context: Sequence[int], indexes: Sequence[TokenIndex]) -> tuple[int, float]:
    """(longest match, the first token's share of the votes), as propose_suffix counts them."""
    votes: dict[int, float] = {}
    longest = 0
    for index in indexes:
        for length, place in index.find(context, 8):
            if place < index.end and (token := index.token(place)) != BREAK:
                lead = 2 if index is indexes[0] else 0
                votes[token] = votes.get(token, 0.0) + 3.0 ** (min(length, 12) + lead)
                longest = max(longest, length)
    return longest, max(votes.values()) / sum(votes.values()) if votes else 0.0


def draft_alone(text: Text, at: int) -> tuple[int, bool]:
    return text.draft[at], False


def suffix_alone(text: Text, at: int) -> tuple[int, bool]:
    return text.suffix[at], True


def better(text: Text, at: int) -> tuple[int, bool]:
    return max((text.draft[at], False), (text.suffix[at], True), key=lambda one: one[0])


def rule(length: int, share: float) -> Rule:
    def choose(text: Text, at: int) -> tuple[int, bool]:
        if text.length[at] >= length and text.share[at] >= share:
            return suffix_alone(text, at)
        return draft_alone(text, at)

    return choose


def walk(text: Text, choose: Rule) -> dict[str, Any]:
    """An answer step by step, as an entry of result.json: tokens after the first, and steps."""
    place, steps, by_suffix = 1, 0, 0
    while place < text.num_tokens:
        accepted, is_suffix = choose(text, place - 1)
        place += accepted + 1
        steps += 1
        by_suffix += is_suffix
    return {
        "id": text.id,
        "category": text.category,
        "delivered": text.num_tokens - 1,
        "steps": steps,
        "by_suffix": by_suffix,
        "tpot_ms": None,
    }


def tau(entries: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(e["delivered"] for e in entries) / sum(e["steps"] for e in entries))


def describe(base: Sequence[Mapping[str, Any]], arm: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """tau, the share of steps that suffix drafted, and tau over the draft's with its interval."""
    figure = tau_figure(build_pairing(base, arm, set()))
    assert figure is not None
    half = half_width(figure.spread, confidence=0.95) if figure.spread else None
    return {
        "tau": tau(arm),
        "by_suffix": sum(e["by_suffix"] for e in arm) / sum(e["steps"] for e in arm),
        "ratio": figure.value,
        "low": None if half is None else figure.value * math.exp(-half),
        "high": None if half is None else figure.value * math.exp(half),
    }


def show(name: str, found: Mapping[str, Any]) -> None:
    print(
        f"{name}: {found['prompts']} prompts, served tau"
        f" {found['served_tau']:.3f}, replay {found['replay']}"
    )
    for mixture, one in found["mixtures"].items():
        print(f"  {mixture}; chosen (m, s): {one['chosen']}")
        for arm, row in one["arms"].items():
            bounds = "" if row["low"] is None else f"({row['low']:.3f} to {row['high']:.3f})"
            print(
                f"    {arm:28} {row['tau']:.3f} {row['by_suffix']:.2f} {row['ratio']:.3f} {bounds}"
            )


if __name__ == "__main__":
    main()
