"""Three scripted engines of a run: plain, baseline, candidate; nine tokens an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from scripted import (
    TARGET,
    Script,
    ScriptedEndpoint,
    build_draft,
    build_facts,
    build_memory,
    build_prompts,
    build_request,
    build_rules,
)

from paceline.endpoint import TokenChoice
from paceline.eval import measure_run

__all__ = ["BASE", "CUT", "FAST", "NAMES", "PLAIN", "RULES", "WARM", "WARM_UP", "Arms", "forked"]

NAMES = ["chat-1", "chat-2", "code-1", "code-2"]
RULES = build_rules(
    min_tokens_for_tpot="4",
    num_resamples="200",
    num_categories="2",
    max_failure_share="0.25",
    min_steps_without_acceptance="8",
)
WARM_UP = [build_request("warm-1"), build_request("warm-2")]
WARM = {
    "warm-1": Script(steps=(None,), num_tokens=2),
    "warm-2": Script(steps=(None,), num_tokens=2),
}

# 9 tokens each: D = 8
PLAIN = Script(steps=(None,) * 8, num_tokens=9, step_ms=10.0)  # TPOT 10
BASE = Script(steps=((1, 3),) * 4, num_tokens=9, step_ms=12.0)  # S 4, TPOT 48/8 = 6
FAST = Script(steps=((3, 3),) * 2, num_tokens=9, step_ms=12.0)  # S 2, TPOT 24/8 = 3
CUT = Script(steps=((3, 3), (2, 3), (3, 3)), num_tokens=9, step_ms=8.0)  # S 3, last step cut to 1


class Arms:
    """The three engines of a run; `log` is the order in which they were asked."""

    def __init__(self, **changes: Any) -> None:
        self.log: list[tuple[str, str]] = []
        self.plain = self._open("plain", build_facts(), dict.fromkeys(NAMES, PLAIN))
        self.baseline = self._open(
            "baseline", build_facts("eagle3", 3), dict.fromkeys(NAMES, BASE), build_memory(900)
        )
        scripts = {"chat-1": FAST, "chat-2": FAST, "code-1": CUT, "code-2": CUT}
        self.candidate = self._open(
            "candidate", build_facts("eagle3", 3), scripts, build_memory(600)
        )
        self.arguments: dict[str, Any] = {
            "plain": self.plain,
            "baseline": self.baseline,
            "candidate": self.candidate,
            "drafts": {"baseline": build_draft("base"), "candidate": build_draft("mine")},
            "prompts": build_prompts(NAMES),
            "warm_up": WARM_UP,
            "rules": RULES,
            "target": TARGET,
            "prompt_set_name": "demo-eval",
            **changes,
        }

    def _open(self, name: str, facts: Any, scripts: Any, memory: Any = None) -> ScriptedEndpoint:
        return ScriptedEndpoint(
            facts, {**WARM, **scripts}, memory_facts=memory, log=self.log, name=name
        )

    def measure(self, out: Path, **changes: Any) -> dict[str, Any]:
        return measure_run(out_dir=out, **{**self.arguments, **changes})


def forked(arms: Arms, gap: float) -> None:
    """The candidate leaves the plain text of code-1 at its third token."""
    tokens = (1000, 1001, 77, *range(1003, 1009))
    arms.candidate.scripts = {**arms.candidate.scripts, "code-1": replace(CUT, tokens=tokens)}
    prefix = (*b"code-1", 1000, 1001)
    view = TokenChoice(token_ids=(1002, 77), logprobs=(-0.5, -0.5 - gap))
    arms.plain.choices = {prefix: view}
