"""One measured run from the words of the command line: arms, prompts, run folder, replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arms import Arm, build_arm_plan, is_same, open_arm, open_arms
from paceline.cli.console import progress, say
from paceline.cli.disk import require_room
from paceline.cli.protocol import keep_floor, require_protocol
from paceline.errors import MissingExtraError, PlanError, ResultError
from paceline.methods import METHODS

if TYPE_CHECKING:
    from paceline.data import Thinking
    from paceline.endpoint import Answer, Endpoint, Request
    from paceline.eval import Cycles, EvalPrompt
    from paceline.rules import Rules
    from paceline.target import TargetFacts

__all__ = [
    "Questions",
    "build_questions",
    "finish_run",
    "measure_drafts",
    "measure_endpoints",
    "measure_in_cycles",
    "plan_arms",
]

_NUM_SAMPLES = 4
_REPLAY_PACKAGES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What every arm is asked. warm_up: other prompts, asked first and not measured."""

    name: str
    sha256: str
    prompts: tuple[EvalPrompt, ...]
    warm_up: tuple[Request, ...]
    thinking: Thinking

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest answer it may get."""
        requests = [*(prompt.request for prompt in self.prompts), *self.warm_up]
        return max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)


def measure_drafts(
    draft: str,
    baseline: str | None,
    *,
    target_name: str,
    prompts: str,
    rules_name: str,
    num_speculative_tokens: int | None,
    max_tokens: int | None,
    device: str | None,
    with_plain: bool,
    with_replay: bool,
    out: Path,
    thinking: Thinking = "none",
    cycles: Cycles | None = None,
    against_itself: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Plans every arm before anything starts, measures, replays, returns the result.

    baseline: None takes the rules' own where the target brings it (its MTP head), else no baseline.
    cycles: fresh servers in A B B A blocks; None is one quick pass with all servers side by side.
    against_itself: the draft is its own baseline on a server of its own; no baseline is given.
    seed: of the order in which arms take turns, and of the resamples.
    """
    from paceline.rules import read_rules
    from paceline.serve import start_ahead
    from paceline.target import read_target

    rules = read_rules(rules_name)
    target = read_target(target_name)
    if baseline is None and not against_itself:
        baseline = _choose_baseline(draft, rules, target)
    require_protocol(baseline, cycles, against_itself)
    start_ahead(device)
    questions = build_questions(prompts, target, rules, max_tokens=max_tokens, thinking=thinking)
    arms = plan_arms(
        target,
        {
            "baseline": draft if against_itself else baseline,
            "candidate": draft,
            "plain": "none" if with_plain else None,
        },
        rules,
        num_speculative_tokens=num_speculative_tokens,
        num_tokens=questions.longest,
        device=device,
        twice=against_itself or cycles is not None,
    )
    if with_replay:
        _require_replay(arms)
    _require_run_folder(out)
    require_room(out)
    if cycles is not None:
        measure_in_cycles(cycles, arms, target, rules, questions, out=out, seed=seed)
    else:
        with open_arms(arms, out) as endpoints:
            measure_endpoints(endpoints, arms, target, rules, questions, out=out, seed=seed)
    if against_itself:
        keep_floor(out, rules)
    return finish_run(out, arms, target, rules, with_replay=with_replay, thinking=thinking)


def measure_in_cycles(
    cycles: Cycles,
    arms: list[Arm],
    target: TargetFacts,
    rules: Rules,
    questions: Questions,
    *,
    out: Path,
    open_one: Callable[[Arm, Path], AbstractContextManager[Endpoint]] = open_arm,
    seed: int = 0,
) -> None:
    """Measures each block on a server of its own and writes requests.jsonl and result.json."""
    from paceline.eval import measure_cycles

    by_name = {arm.name: arm for arm in arms}
    with progress("measuring") as show:
        measure_cycles(
            lambda name: open_one(by_name[name], out),
            cycles=cycles,
            with_plain="plain" in by_name,
            on_progress=show,
            **_describe_run(arms, target, rules, questions, out, seed),
        )


def _describe_run(
    arms: list[Arm],
    target: TargetFacts,
    rules: Rules,
    questions: Questions,
    out: Path,
    seed: int,
) -> dict[str, Any]:
    from paceline.records import build_provenance

    return {
        "drafts": {arm.name: arm.draft for arm in arms},
        "prompts": questions.prompts,
        "warm_up": questions.warm_up,
        "rules": rules,
        "target": target,
        "out_dir": out,
        "prompt_set_name": questions.name,
        "prompt_set_sha256": questions.sha256,
        "thinking": questions.thinking,
        "seed": seed,
        "provenance": build_provenance(
            seed=seed,
            inputs={arm.name: arm.draft.sha256 for arm in arms if arm.draft is not None},
        ),
    }


def build_questions(
    prompts: str,
    target: TargetFacts,
    rules: Rules,
    *,
    max_tokens: int | None = None,
    thinking: Thinking = "none",
) -> Questions:
    """Prompts and warm-up as requests. Raises DataError before any engine runs."""
    from paceline.data import build_requests, read_prompts, require_few_rejected
    from paceline.endpoint import Sampling
    from paceline.eval import EvalPrompt

    asked = read_prompts(prompts)
    require_few_rejected(asked)
    for line, reason in asked.rejected:
        say(f"  line {line} rejected: {reason}")
    sampling = Sampling(
        max_tokens=max_tokens or rules.sampling.max_tokens,
        temperature=rules.sampling.temperature,
        top_p=rules.sampling.top_p,
        top_k=rules.sampling.top_k,
    )
    num_warm_up = rules.protocol.num_warm_up_requests
    others = read_prompts(f"train:{8 * max(1, num_warm_up // 8 + 1)}").prompts[:num_warm_up]
    requests = build_requests(asked.prompts, target, sampling, thinking=thinking)
    return Questions(
        name=asked.name,
        sha256=asked.sha256,
        prompts=tuple(
            EvalPrompt(category=prompt.category, request=request)
            for prompt, request in zip(asked.prompts, requests, strict=True)
        ),
        warm_up=tuple(build_requests(others, target, sampling, thinking=thinking)),
        thinking=thinking,
    )


def plan_arms(
    target: TargetFacts,
    drafts: Mapping[str, str | None],
    rules: Rules,
    *,
    num_speculative_tokens: int | None = None,
    num_tokens: int = 0,
    max_num_seqs: int = 8,
    device: str | None = None,
    twice: bool = False,
) -> list[Arm]:
    """One checked plan an arm; the same draft twice is served once, unless `twice`.

    num_speculative_tokens: for every arm; None takes the rules'. num_tokens: what the longest
    request needs; the engines hold at least that much.
    """
    from paceline.serve import check_plan

    speculation = rules.speculation
    asked = {name: draft for name, draft in drafts.items() if draft is not None}
    if num_speculative_tokens and all(draft == "none" for draft in asked.values()):
        raise PlanError(
            f"K = {num_speculative_tokens} has no effect: no arm drafts", fix="Leave --k out."
        )
    if num_tokens > target.max_position_embeddings:
        raise PlanError(
            f"the longest prompt and its answer need {num_tokens:,} tokens",
            expected=f"at most {target.max_position_embeddings:,}, the target's positions",
            fix="Lower --max-tokens, or leave the longest prompts out.",
        )
    arms: list[Arm] = []
    for name, draft in asked.items():
        k = num_speculative_tokens or (
            speculation.baseline_num_speculative_tokens
            if name == "baseline"
            else speculation.entry_num_speculative_tokens
        )
        plan = build_arm_plan(
            target,
            draft,
            num_speculative_tokens=None if draft == "none" else k,
            num_tokens=num_tokens,
            max_num_seqs=max_num_seqs,
            device=device,
        )
        arm = Arm(name=name, draft=plan.draft, plan=plan)
        again = any(a.name == "baseline" and is_same(a, arm) for a in arms)
        if name == "candidate" and again and not twice:
            continue
        for note in check_plan(plan):
            say(f"note on {name}: {note}")
        arms.append(arm)
    return arms


def measure_endpoints(
    endpoints: Mapping[str, Endpoint],
    arms: list[Arm],
    target: TargetFacts,
    rules: Rules,
    questions: Questions,
    *,
    out: Path,
    seed: int = 0,
) -> None:
    """Asks every arm every prompt and writes requests.jsonl and result.json."""
    from paceline.eval import measure_run

    with progress("measuring") as show:
        measure_run(
            plain=endpoints.get("plain"),
            baseline=endpoints.get("baseline"),
            candidate=endpoints.get("candidate") or endpoints["baseline"],
            on_progress=show,
            **_describe_run(arms, target, rules, questions, out, seed),
        )


def finish_run(
    out: Path,
    arms: list[Arm],
    target: TargetFacts,
    rules: Rules,
    *,
    with_replay: bool,
    thinking: Thinking = "none",
) -> dict[str, Any]:
    """Replays the served steps, adds samples and the machine's noise floor, writes the result."""
    from paceline.data import open_tokenizer
    from paceline.eval import (
        add_noise_floor,
        add_replay,
        build_samples,
        find_noise_floor,
        read_answers,
        write_result,
    )
    from paceline.records import read_json

    result = read_json(out / "result.json")
    proposed: dict[str, Any] = {}
    for arm in arms:
        if with_replay and _has_weights(arm):
            replay = _replay(arm, read_answers(out, arm.name), target)
            proposed[arm.name] = replay.proposed
            figures = {
                "num_steps": replay.num_steps,
                "num_agree": replay.num_agree,
                "gaps": list(replay.gaps),
                "position_1_served": replay.position_1_served,
                "position_1_trained": replay.position_1_trained,
            }
            result = add_replay(result, {arm.name: figures}, rules)
    shown = next(arm.name for arm in reversed(arms) if arm.name in ("candidate", "baseline"))
    answers = read_answers(out, shown)
    steps = proposed.get(shown)
    result["samples"] = build_samples(
        answers[:: max(1, len(answers) // _NUM_SAMPLES)][:_NUM_SAMPLES],
        open_tokenizer(target, thinking=thinking).decode,
        {a.request_id: s for a, s in zip(answers, steps, strict=True)} if steps else None,
        arm=shown,
        categories={row["id"]: row["category"] for row in result["arms"][shown]["requests"]},
    )
    if "baseline" in result["arms"]:
        result = add_noise_floor(result, find_noise_floor(result), rules)
    write_result(out, result)
    return result


def _replay(arm: Arm, answers: list[Answer], target: TargetFacts) -> Any:
    from paceline.train import replay_draft

    assert arm.draft is not None
    say(f"replaying the served steps of {arm.name} through the trainer's own forward ...")
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in answers]
    k = arm.plan.num_speculative_tokens
    return replay_draft(arm.draft, target, texts, num_speculative_tokens=k, device=arm.plan.device)


def _has_weights(arm: Arm) -> bool:
    return METHODS[arm.plan.method].has_weights


def _require_run_folder(out: Path) -> None:
    """An unfinished run goes on; a folder of something else is left alone."""
    names = {item.name for item in out.iterdir()} if out.is_dir() else set()
    others = {name for name in names if not name.startswith("engine-")}
    if others and not names & {"requests.jsonl", "result.json"}:
        raise ResultError(
            f"the folder holds {sorted(others)[0]!r} and no run",
            where=str(out),
            expected="a new folder, or one that `paceline eval` began",
            fix="Choose another --out.",
        )


def _choose_baseline(draft: str, rules: Rules, target: TargetFacts) -> str | None:
    """The rules' own baseline where the target brings it: its MTP head. None elsewhere."""
    from paceline.draft import NATIVE

    if rules.speculation.baseline_family != "mtp" or not target.num_mtp_layers:
        return None
    if draft != NATIVE:
        say(f"baseline: {NATIVE}, {target.name}'s own MTP head, as {rules.name} has it")
    return NATIVE


def _require_replay(arms: list[Arm]) -> None:
    """The replay's packages are asked for before anything starts. Raises MissingExtraError."""
    if not any(_has_weights(arm) for arm in arms):
        return
    missing = [name for name in _REPLAY_PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the check of trained against served acceptance needs {' and '.join(missing)}",
            fix="Run `pip install 'paceline[train]'`, or leave it out with --no-replay.",
        )
