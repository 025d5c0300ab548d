"""A judge's public folder with a whole field: ties, a withheld one, a refused one, odd names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from build_result import build_result

from paceline.rules import Rules

# team, name, skill of the candidate, seed, family, what differs
FIELD: tuple[tuple[str, str, float, int, str, dict[str, Any]], ...] = (
    ("Nordlicht", "tailwind-eagle3-v2", 0.66, 1, "eagle3", {"final": True}),
    ("Nordlicht", "tailwind-eagle3-v1", 0.60, 9, "eagle3", {}),
    ("Kitesurf", "kite-mtp", 0.655, 2, "mtp", {"memory": 0.55}),
    ("Les Éoliennes", "éolienne (petite)", 0.61, 3, "eagle3", {"memory": 0.4}),
    ("ゼファー", "そよ風-medusa", 0.55, 4, "medusa", {"memory": 1.3}),
    ("A team with a very long name, of a very long department, of one university",
     "a-draft-with-a-name-that-goes-on-and-on-and-on-2027-final-final", 0.52, 5, "draft_model", {}),
    ("Flaute", "calm", 0.2, 6, "eagle3", {}),
    ("Sprint", "unfair-wind", 0.7, 7, "eagle3", {"withheld": "acceptance depends on the order of "
     "requests: state is kept across them"}),
    ("Mallory", "<script>alert(1)</script>", 0.5, 8, "eagle3", {"state": "refused",
     "reason": "not acceptable: fs.pickle, cfg.auto_map"}),
    ("Pech", "no-luck", 0.5, 10, "mtp", {"state": "failed", "reason": "the engine died."}),
)  # fmt: skip


def write_field(folder: Path, rules: Rules) -> Path:
    """results.jsonl and entries/, as `paceline judge publish` writes them (unsigned)."""
    lines = []
    for number, (team, name, skill, seed, family, more) in enumerate(FIELD):
        identity = f"{number:x}" * 64
        body: dict[str, Any] = {
            "kind": "result",
            "team": team,
            "name": name,
            "family": family,
            "content_sha256": identity,
            "round": 0,
            "state": more.get("state", "done"),
            "reason": more.get("reason", ""),
            "withheld": [more["withheld"]] if "withheld" in more else [],
            "notes": [],
        }
        lines.append({"body": body, "hmac": ""})
        if more.get("final"):
            final = {"kind": "final", "team": team, "content_sha256": identity, "round": 0}
            lines.append({"body": final, "hmac": ""})
        if body["state"] == "done":
            result = build_entry(rules, name=name, skill=skill, seed=seed, family=family, **more)
            own = folder / "entries" / identity[:16]
            own.mkdir(parents=True)
            (own / "result.json").write_text(json.dumps(result))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "results.jsonl").write_text(text)
    return folder


def build_entry(
    rules: Rules,
    *,
    name: str,
    skill: float,
    seed: int,
    family: str = "eagle3",
    memory: float | None = None,
    **_: Any,
) -> dict[str, Any]:
    """One result under these rules; memory: of the baseline's."""
    result, _rows = build_result(
        skills={"candidate": skill, "baseline": 0.5}, name=name, seed=seed, prompts_per_category=6
    )
    result["rules"] = {"name": rules.name, "version": rules.version, "sha256": rules.sha256,
                       "provisional": list(rules.provisional)}  # fmt: skip
    candidate = result["arms"]["candidate"]
    candidate["draft"]["family"] = family
    if memory is not None:
        base = result["arms"]["baseline"]["memory"]["total_bytes"]
        candidate["memory"]["total_bytes"] = round(base * memory)
        ratio = 1 / memory
        result["ratios"]["memory"] = {"value": ratio, "low": ratio, "high": ratio}
    score = result["score"]
    gain = 0.0
    for key, weight in (("tau", 0.5), ("memory", 0.25), ("tpot", 0.25)):
        ratio = result["ratios"][key]["value"]
        cap = rules.caps[key]
        capped = ratio if cap is None else min(ratio, cap)
        gain += 100 * weight * capped
        score["terms"][key] = {"ratio": ratio, "capped_ratio": capped, "cap": cap,
                               "weight": weight, "points": 100 * weight * capped}  # fmt: skip
    tau = result["ratios"]["tau"]["value"]
    passed = tau >= rules.gate.minimum_tau_ratio
    half = 1.2 + 0.8 * math.sin(seed)
    score.update(value=gain, low=gain - half, high=gain + half, ranked=passed)
    score["gate"] = {"minimum_tau_ratio": rules.gate.minimum_tau_ratio, "passed": passed}
    score["reasons"] = [] if passed else [
        f"acceptance is {tau:.3f} of the baseline's, below the gate of "
        f"{rules.gate.minimum_tau_ratio:g}"
    ]  # fmt: skip
    return result
