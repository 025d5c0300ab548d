"""A quantised draft beside its original, both served; the table, and the gate."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.arms import Arm, build_arm_plan, open_arms
from paceline.cli.console import console, progress, say
from paceline.cli.disk import require_room
from paceline.cli.measure import build_questions, finish_run, measure_endpoints, plan_arms

if TYPE_CHECKING:
    from paceline.data import Thinking
    from paceline.draft import Draft
    from paceline.endpoint import Answer
    from paceline.quantize import Price
    from paceline.target import TargetFacts

__all__ = ["measure_price", "measure_target_price"]

KEPT_ORIGINAL = 1


def measure_price(
    before: Draft,
    after: Draft,
    target: TargetFacts,
    out: Path,
    *,
    limit: float | None,
    prompts: str,
    rules_name: str,
    max_tokens: int | None,
    device: str | None,
    thinking: Thinking,
) -> int:
    """Serves both, prints the table, and gives the new draft its name `out` if it passed.

    limit: allowed loss of acceptance; None allows any. The run lies in `out`.measure, the figures
    in `out`.price.json. The exit code: 0, or 1 where the original is kept.
    """
    from paceline.quantize import build_price
    from paceline.records import write_json
    from paceline.report import render_price, write_report
    from paceline.rules import read_rules

    rules = read_rules(rules_name)
    run = out.with_name(f"{out.name}.measure")
    if run.exists():
        shutil.rmtree(run)
    questions = build_questions(prompts, target, rules, max_tokens=max_tokens, thinking=thinking)
    arms = plan_arms(
        target,
        {"baseline": str(before.path), "candidate": str(after.path), "plain": "none"},
        rules,
        num_speculative_tokens=before.num_speculative_tokens,
        num_tokens=questions.longest,
        device=device,
        twice=True,
    )
    require_room(run)
    with open_arms(arms, run) as endpoints:
        kernels = {
            name: endpoint.kernels()  # type: ignore[attr-defined]
            for name, endpoint in endpoints.items()
            if name != "plain"
        }
        measure_endpoints(endpoints, arms, target, rules, questions, out=run)
    result = finish_run(run, arms, target, rules, with_replay=False, thinking=thinking)
    price = build_price(
        result,
        files_bytes=(before.files_bytes, after.files_bytes),
        kernels=kernels,
        max_loss=limit,
    )
    record = dataclasses.asdict(price)
    write_json(out.with_name(f"{out.name}.price.json"), record)
    console.print(render_price(record))
    named = ", ".join(f"{n} x {k}" for k, n in kernels["candidate"]["draft"].items())
    say(f"the draft's kernels: {named}")
    say(f"report: {write_report(run)}")
    return _decide(price, after.path, out, ("tau", "lower", "higher"), result.get("withheld"))


def measure_target_price(
    before: TargetFacts,
    after: TargetFacts,
    out: Path,
    *,
    limit: float | None,
    prompts: str,
    rules_name: str,
    max_tokens: int | None,
    device: str | None,
    thinking: Thinking,
) -> int:
    """The same for a target: both answer each prompt, in turns, and read the original's answers."""
    from paceline.quantize import build_target_price
    from paceline.records import write_json
    from paceline.report import render_price
    from paceline.rules import read_rules
    from paceline.serve import check_plan, find_altered_weights, with_applied_weights

    rules = read_rules(rules_name)
    questions = build_questions(prompts, before, rules, max_tokens=max_tokens, thinking=thinking)
    arms = []
    for name, target in (("before", before), ("after", after)):
        plan = build_arm_plan(target, "none", num_tokens=questions.longest, device=device)
        check_plan(plan)
        arms.append(Arm(name=name, draft=None, plan=with_applied_weights(plan)))
    run = out.with_name(f"{out.name}.measure")
    run.mkdir(exist_ok=True)
    answers: dict[str, list[Answer]] = {"before": [], "after": []}
    with open_arms(arms, run) as endpoints:
        kernels = {name: e.kernels() for name, e in endpoints.items()}  # type: ignore[attr-defined]
        same, altered = find_altered_weights(endpoints["after"], after.path)  # type: ignore[arg-type]
        for endpoint in endpoints.values():
            endpoint.generate(questions.warm_up)
        with progress("measuring") as show:
            for number, prompt in enumerate(questions.prompts, 1):
                order = list(endpoints) if number % 2 else list(reversed(endpoints))
                for name in order:
                    answers[name] += endpoints[name].generate([prompt.request])
                show(number, len(questions.prompts))
        texts = [(a.prompt_ids, a.output_ids) for a in answers["before"]]
        read = {name: endpoint.text_logprobs(texts) for name, endpoint in endpoints.items()}
    pairs = list(zip(answers["before"], answers["after"], strict=True))
    timed = [(a.tpot_ms, b.tpot_ms) for a, b in pairs]
    both = [(a, b) for a, b in timed if a is not None and b is not None]
    price = build_target_price(
        read["before"],
        read["after"],
        identical=sum(a.output_ids == b.output_ids for a, b in pairs),
        tpot_ms=([a for a, _ in both], [b for _, b in both]),
        files_bytes=(_weights_bytes(before), _weights_bytes(after)),
        kernels={name: found["target"] for name, found in kernels.items()},
        max_loss=limit,
    )
    record = {**dataclasses.asdict(price), "altered_in_engine": altered}
    write_json(out.with_name(f"{out.name}.price.json"), record)
    console.print(render_price(record))
    named = ", ".join(f"{n} x {k}" for k, n in price.kernels["after"].items())
    say(f"the target's kernels: {named}")
    say(f"quantised matrices that the engine holds as written, bit for bit: {same}")
    if altered:
        say(f"the engine multiplies by others than were written: {', '.join(altered)}")
    what = ("perplexity of the original's answers", "higher", "lower")
    return _decide(price, after.path, out, what)


def _weights_bytes(target: TargetFacts) -> int:
    return sum(path.stat().st_size for path in target.path.glob("*.safetensors"))


def _decide(
    price: Price, place: Path, out: Path, what: tuple[str, str, str], withheld: object = None
) -> int:
    """what: the figure, how it is called when it is worse, and when it is better."""
    from paceline.records import storage_errors

    figure, worse, better = what
    loss = f"{figure} is {abs(price.loss):.2%} {worse if price.loss >= 0 else better}"
    if price.loss_low is not None and price.loss_high is not None:
        loss += f" (loss {price.loss_low:.2%} to {price.loss_high:.2%})"
    if price.verdict == "exceeds" or (isinstance(withheld, dict) and "candidate" in withheld):
        why = f"{price.max_loss:.2%} allowed" if price.verdict == "exceeds" else "its texts differ"
        say(f"{loss}, {why}: the original is kept. What was made lies in {place}")
        return KEPT_ORIGINAL
    with storage_errors(out):
        os.replace(place, out)
    if price.verdict == "open":
        loss += f"; more prompts are needed to say that it is below {price.max_loss:.2%}"
    say(f"{loss}. It lies in {out}")
    return 0
