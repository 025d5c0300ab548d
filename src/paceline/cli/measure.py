"""One measured run from the words of the command line: arms, prompts, run folder, replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arms import Arm, build_arm_plan, open_arms
from paceline.cli.console import progress, say

if TYPE_CHECKING:
    from paceline.endpoint import Answer, Endpoint
    from paceline.rules import Rules
    from paceline.target import TargetFacts

__all__ = ["finish_run", "measure_drafts", "measure_endpoints", "plan_arms"]

_NUM_SAMPLES = 4


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
) -> dict[str, Any]:
    """Plans every arm before anything starts, measures, replays, returns the result."""
    from paceline.rules import read_rules
    from paceline.target import read_target

    rules = read_rules(rules_name)
    target = read_target(target_name)
    arms = plan_arms(
        target,
        {"baseline": baseline, "candidate": draft, "plain": "none" if with_plain else None},
        rules,
        num_speculative_tokens=num_speculative_tokens,
        device=device,
    )
    out.mkdir(parents=True, exist_ok=True)
    with open_arms(arms, out) as endpoints:
        measure_endpoints(
            endpoints, arms, target, rules, prompts=prompts, max_tokens=max_tokens, out=out
        )
    return finish_run(out, arms, target, rules, with_replay=with_replay)


def plan_arms(
    target: TargetFacts,
    drafts: Mapping[str, str | None],
    rules: Rules,
    *,
    num_speculative_tokens: int | None = None,
    max_num_seqs: int = 8,
    device: str | None = None,
) -> list[Arm]:
    """One checked plan an arm; the same draft twice is served once."""
    from paceline.serve import check_plan

    asked = {name: draft for name, draft in drafts.items() if draft is not None}
    if "baseline" in asked and asked["baseline"] == asked.get("candidate"):
        del asked["candidate"]
    arms = []
    for name, draft in asked.items():
        k = num_speculative_tokens or rules.speculation.entry_num_speculative_tokens
        plan = build_arm_plan(
            target,
            draft,
            num_speculative_tokens=None if draft == "none" else k,
            max_num_seqs=max_num_seqs,
            device=device,
        )
        for note in check_plan(plan):
            say(f"note on {name}: {note}")
        arms.append(Arm(name=name, draft=plan.draft, plan=plan))
    return arms


def measure_endpoints(
    endpoints: Mapping[str, Endpoint],
    arms: list[Arm],
    target: TargetFacts,
    rules: Rules,
    *,
    prompts: str,
    max_tokens: int | None,
    out: Path,
) -> None:
    """Asks every arm every prompt and writes requests.jsonl and result.json."""
    from paceline.data import build_requests, read_prompts
    from paceline.endpoint import Sampling
    from paceline.eval import EvalPrompt, measure_run
    from paceline.records import build_provenance

    asked = read_prompts(prompts)
    sampling = Sampling(
        max_tokens=max_tokens or rules.sampling.max_tokens,
        temperature=rules.sampling.temperature,
        top_p=rules.sampling.top_p,
        top_k=rules.sampling.top_k,
    )
    warm_up = read_prompts(f"train:{8 * max(1, rules.protocol.num_warm_up_requests // 8 + 1)}")
    with progress("measuring") as show:
        measure_run(
            plain=endpoints.get("plain"),
            baseline=endpoints.get("baseline"),
            candidate=endpoints.get("candidate") or endpoints["baseline"],
            drafts={arm.name: arm.draft for arm in arms},
            prompts=[
                EvalPrompt(category=prompt.category, request=request)
                for prompt, request in zip(
                    asked.prompts,
                    build_requests(asked.prompts, target, sampling),
                    strict=True,
                )
            ],
            warm_up=build_requests(
                warm_up.prompts[: rules.protocol.num_warm_up_requests], target, sampling
            ),
            rules=rules,
            target=target,
            out_dir=out,
            prompt_set_name=asked.name,
            prompt_set_sha256=asked.sha256,
            provenance=build_provenance(
                seed=0,
                inputs={arm.name: arm.draft.sha256 for arm in arms if arm.draft is not None},
            ),
            on_progress=show,
        )


def finish_run(
    out: Path, arms: list[Arm], target: TargetFacts, rules: Rules, *, with_replay: bool
) -> dict[str, Any]:
    """Replays the served steps, adds samples, writes result.json again and returns it."""
    from paceline.data import open_tokenizer
    from paceline.eval import add_replay, build_samples, read_answers, write_result
    from paceline.records import read_json

    result = read_json(out / "result.json")
    proposed: dict[str, Any] = {}
    for arm in arms:
        if with_replay and arm.draft is not None and arm.draft.tensors:
            replay = _replay(arm, read_answers(out, arm.name), target)
            proposed[arm.name] = replay.proposed
            figures = {
                "num_steps": replay.num_steps,
                "num_agree": replay.num_agree,
                "position_1_served": replay.position_1_served,
                "position_1_trained": replay.position_1_trained,
            }
            result = add_replay(result, {arm.name: figures}, rules)
    shown = next(arm.name for arm in reversed(arms) if arm.name in ("candidate", "baseline"))
    answers = read_answers(out, shown)
    steps = proposed.get(shown)
    result["samples"] = build_samples(
        answers[:: max(1, len(answers) // _NUM_SAMPLES)][:_NUM_SAMPLES],
        open_tokenizer(target).decode,
        {a.request_id: s for a, s in zip(answers, steps, strict=True)} if steps else None,
        arm=shown,
        categories={row["id"]: row["category"] for row in result["arms"][shown]["requests"]},
    )
    write_result(out, result)
    return result


def _replay(arm: Arm, answers: list[Answer], target: TargetFacts) -> Any:
    from paceline.train import replay_draft

    assert arm.draft is not None
    say(f"replaying the served steps of {arm.name} through the trainer's own forward ...")
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in answers]
    return replay_draft(arm.draft, target, texts, device=arm.plan.device)
