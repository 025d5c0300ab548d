"""Figures of a target's drafts on real vLLM, each K on an engine of its own.

    python recipes/pocket/figures.py --target POCKET --out OUT --drafts native OUT/mtp OUT/eagle3 \\
        --k 1 3 5 --device cuda

For every draft and K: acceptance length as vLLM counts it, delivered tokens a step, time per token
of one stream, draft memory at 16,384 tokens as the engine holds it and as `paceline forecast` says,
texts that differ from the target's own, and the replay of the served steps. `none` comes first by
itself. Writes OUT/figures.json and prints a table. --eager: no CUDA graphs, faster starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from paceline.acceptance import build_acceptance
from paceline.data import build_requests, read_prompts
from paceline.draft import NATIVE, Draft, read_draft, read_native_draft, resolve_draft
from paceline.endpoint import Answer, Sampling
from paceline.records import build_provenance, write_json
from paceline.serve import VllmEndpoint, build_plan, start
from paceline.target import TargetFacts, read_target
from paceline.train import replay_draft

CONTEXT = 16_384


def open_draft(name: str, target: TargetFacts, k: int) -> Draft:
    if name == NATIVE:
        return read_native_draft(target, num_speculative_tokens=k)
    return read_draft(resolve_draft(name))


def begin(args: argparse.Namespace, draft: Draft | None, k: int | None) -> VllmEndpoint:
    plan = build_plan(
        args.target,
        draft,
        device=args.device,
        num_speculative_tokens=k,
        enforce_eager=True if args.eager else None,
        max_model_len=2048,
    )
    name = "none" if draft is None else draft.name.replace(" ", "-")
    return start(plan, log_path=args.out / "logs" / f"{name}-{k or 0}.log")


def ask(args: argparse.Namespace, endpoint: VllmEndpoint) -> list[Answer]:
    """One stream, in order; two requests first that do not count."""
    sampling = Sampling(max_tokens=args.max_tokens)
    prompts = read_prompts("held-out").prompts
    chosen = prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]
    requests = build_requests(chosen, args.target, sampling, thinking=args.thinking)
    warm = read_prompts("train:8").prompts[:2]
    endpoint.generate(build_requests(warm, args.target, sampling, thinking=args.thinking))
    return list(endpoint.generate(requests, concurrency=1))


def tpot_ms(answers: list[Answer]) -> float | None:
    times = [answer.tpot_ms for answer in answers]
    kept = [time for time in times if time is not None]
    return statistics.geometric_mean(kept) if kept else None


def forecast_bytes(args: argparse.Namespace, draft: Draft, k: int) -> int | None:
    """M by arithmetic; only a head of the target's own sizes needs no further words."""
    if draft.family != "mtp":
        return None
    from paceline.forecast import CachePlan, measure_memory, parse_design, read_shape

    shape = read_shape(str(args.target.path))
    design = parse_design(f'family = "mtp"\nnum_speculative_tokens = {k}\n', shape)
    plan = CachePlan(device=args.device)
    return measure_memory(design, shape, context_tokens=CONTEXT, plan=plan).total_bytes


def measure(args: argparse.Namespace, name: str, k: int, plain: list[Answer]) -> dict[str, Any]:
    draft = open_draft(name, args.target, k)
    with begin(args, draft, k) as endpoint:
        memory = endpoint.memory(context_tokens=CONTEXT)
        with_draft, without = endpoint.pool(context_tokens=CONTEXT)
        answers = ask(args, endpoint)
    took = [n for answer in answers for n in answer.per_step_accepted or ()]
    served = build_acceptance(took, [k] * len(took), num_speculative_tokens=k)
    row: dict[str, Any] = {
        "draft": name,
        "k": k,
        "num_steps": served.num_steps,
        "acceptance_length": served.acceptance_length,
        "position_acceptance": list(served.position_acceptance),
        "delivered_per_step": sum(len(a.output_ids) - 1 for a in answers) / max(1, len(took)),
        "tpot_ms": tpot_ms(answers),
        "num_texts": len(answers),
        "texts_as_plain": sum(
            a.output_ids == b.output_ids for a, b in zip(answers, plain, strict=True)
        ),
        "memory": None
        if memory is None
        else {
            part: getattr(memory, part)
            for part in ("weights_bytes", "buffers_bytes", "kv_bytes", "state_bytes", "total_bytes")
        },
        "forecast_bytes": forecast_bytes(args, draft, k),
        "pool": {"with_draft": with_draft, "without": without},
    }
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in answers]
    for dtype in args.replay:
        replay = replay_draft(
            draft,
            args.target,
            texts,
            num_speculative_tokens=k,
            device=args.device,
            dtype=dtype,
        )
        row[f"replay_{dtype}"] = {
            "agree": replay.num_agree,
            "of": replay.num_steps,
            "beyond_ties": sum(gap > args.tie for gap in replay.gaps),
            "position_1": [replay.position_1_served, replay.position_1_trained],
        }
    return row


def show(row: dict[str, Any]) -> str:
    memory = row["memory"]["total_bytes"] if row["memory"] else None
    replay = next((v for key, v in row.items() if key.startswith("replay_")), None)
    words = [
        f"{Path(row['draft']).name:8}",
        f"K {row['k']}",
        f"length {row['acceptance_length']:.3f}",
        f"delivered {row['delivered_per_step']:.3f}",
        f"TPOT {row['tpot_ms']:.3f} ms" if row["tpot_ms"] else "TPOT not measured",
        f"M {memory:,}" if memory else "M not measured",
        f"texts {row['texts_as_plain']}/{row['num_texts']}",
    ]
    if replay:
        words.append(f"replay {replay['agree']}/{replay['of']}")
    return "  ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, type=read_target)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--drafts", nargs="+", default=[NATIVE])
    parser.add_argument("--k", nargs="+", type=int, default=[3])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--thinking", choices=("on", "off"), default="off")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--replay", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--tie", type=float, default=0.5, help="logits under which rounding flips")
    args = parser.parse_args()
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    path = args.out / "figures.json"
    with begin(args, None, None) as endpoint:
        plain_pool = endpoint.pool(context_tokens=CONTEXT)[0]
        plain = ask(args, endpoint)
    result: dict[str, Any] = {
        "provenance": build_provenance(seed=0),
        "plain": {"tpot_ms": tpot_ms(plain), "pool": plain_pool},
        "rows": [],
    }
    print(f"none      TPOT {result['plain']['tpot_ms']:.3f} ms", flush=True)
    for name in args.drafts:
        for k in args.k:
            row = measure(args, name, k, plain)
            assert row["pool"]["without"] == plain_pool, "the pool without the draft is another"
            result["rows"].append(row)
            write_json(path, result)
            print(show(row), flush=True)
    print(json.dumps({"figures": str(path)}))


if __name__ == "__main__":
    main()
