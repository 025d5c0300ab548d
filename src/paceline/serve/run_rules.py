"""The `run.*` rules: what was seen of a booted draft, as findings. One function a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from paceline.endpoint import Answer
from paceline.methods import METHODS
from paceline.serve.run_case import RunCase, Told, finding
from paceline.serve.run_loaded import check_loaded

__all__ = ["check_observed"]

_MIN_COVERAGE = 0.995  # of the decode steps; validation notes, "coverage gate"
_MIN_POSITION_1 = 0.02
_MIN_STEPS = 50
_MEMORY_TOLERANCE = 1.05
# what vLLM 0.31.0 makes of the name in an MTP folder's config (config/speculative.py)
_RENAMED = {"Qwen3_5ForCausalLM": "Qwen3_5MTP"}


def check_observed(case: RunCase) -> list[Told]:
    """All there is to tell by the `run.*` rules, in the order in which the draft was looked at."""
    rules: tuple[Callable[[RunCase], Iterator[Told]], ...] = (
        check_sandbox,
        check_boot,
        check_method,
        check_loaded,
        check_memory,
        check_finite,
        check_coverage,
        check_zero,
    )
    return [item for rule in rules for item in rule(case)]


def check_sandbox(case: RunCase) -> Iterator[Told]:
    """run.sandbox: which walls stood. A note where all did, a warning where one did not."""
    isolation = case.seen.isolation
    if isolation is None:
        return
    if isolation.is_whole:
        yield finding(
            "run.sandbox",
            "",
            f"the draft ran in a sandbox: {isolation}",
            found=isolation.mode,
            severity="note",
        )
        return
    yield finding(
        "run.sandbox",
        "",
        f"the draft ran in a weaker sandbox: {isolation}",
        found=isolation.mode,
        expected="namespaces: no network, nothing to write to, no other process",
        fix="Allow user namespaces on this machine, or use one that is nobody's loss.",
    )


def check_boot(case: RunCase) -> Iterator[Told]:
    """run.boot: the engine came up, answered, and ended within its limits."""
    seen = case.seen
    if seen.error is None:
        return
    what, fix = seen.error.what, seen.error.fix
    if seen.ended_for == "memory":
        limit, peak = seen.memory_limit_bytes, seen.peak_bytes
        what = f"it took {peak:,} bytes of memory and was ended; the limit is {limit:,}"
        fix = "A draft that needs so much more than its size is built wrongly."
    elif seen.ended_for == "time":
        what, fix = "it took longer than the time limit and was ended", "Make the draft smaller."
    elif seen.ended_for == "processes":
        what, fix = "it started too many processes and was ended", "A draft starts none."
    yield finding(
        "run.boot",
        "",
        what if " while " in what else f"while {seen.doing}: {what}",
        where=seen.doing,
        found=seen.ended_for or type(seen.error).__name__,
        expected="an engine that starts with this draft, and answers",
        fix=_one_line(fix) or "Read the engine's log.",
        severity="note" if _is_ours(case) else None,
    )


def _one_line(text: str) -> str:
    """What to do, and of the log's last lines the last: a finding is one line."""
    head, _, lines = text.partition(" Its last lines:")
    last = lines.strip().splitlines()[-1].strip() if lines.strip() else ""
    return f"{head} It ends: {last[:200]}" if last else head


def _is_ours(case: RunCase) -> bool:
    """A family that cannot be served here yet says nothing about the draft."""
    return not METHODS[case.draft.family].serves


def check_method(case: RunCase) -> Iterator[Told]:
    """run.method: method, K, runner and architecture are those of the folder."""
    seen = case.seen
    if seen.facts_problem is not None:
        yield finding(
            "run.method",
            "spec.json",
            seen.facts_problem.what,
            expected="what the folder says",
            found=seen.facts.method if seen.facts else "",
            fix="Name the family of the weights in spec.json, and its architecture in config.json.",
        )
    stated = case.draft.config.get("architectures")
    if isinstance(stated, list) and case.draft.family == "mtp":
        stated = [_RENAMED.get(name, name) for name in stated]
    found = [name.replace("Peagle", "Eagle3") for name in seen.architectures]  # the same classes
    if found and isinstance(stated, list) and found != stated:
        yield finding(
            "run.method",
            "config.json",
            f"the engine resolved the architecture to {', '.join(seen.architectures)}",
            where="architectures",
            found=", ".join(seen.architectures),
            expected=", ".join(map(str, stated)),
            fix="Use the architecture and model_type of the family.",
            severity=case.doubt,
        )


def check_memory(case: RunCase) -> Iterator[Told]:
    """run.mem: what the draft takes is what its headers said, within five in a hundred."""
    memory = case.seen.memory
    if memory is None:
        return
    total, estimate = memory.total_bytes, case.estimate_bytes
    text = (
        f"measured {total:,} bytes at {memory.context_tokens:,} tokens: weights"
        f" {memory.weights_bytes:,}, buffers {memory.buffers_bytes:,}, keys, values and state"
        f" {memory.kv_bytes + memory.state_bytes:,}"
    )
    over = estimate is not None and total > estimate * _MEMORY_TOLERANCE
    yield finding(
        "run.mem",
        "",
        f"{text}; by shape it is {estimate:,}" if over else text,
        found=f"{total:,} bytes",
        expected="" if estimate is None else f"at most {int(estimate * _MEMORY_TOLERANCE):,} bytes",
        fix="Something is built that no file holds: look at max_position_embeddings and sizes."
        if over
        else "",
        severity=case.doubt if over else "note",
    )


def check_finite(case: RunCase) -> Iterator[Told]:
    """run.finite: no logit of the draft is NaN or infinite."""
    logits = case.seen.logits
    if logits is None:
        return
    rows, bad = logits["num_rows"], logits["num_bad_rows"]
    if bad:
        yield finding(
            "run.finite",
            "model.safetensors",
            f"{bad:,} of {rows:,} rows of the draft's logits hold NaN or infinity",
            found=f"{bad:,} rows",
            expected="finite logits",
            fix="Look for NaN or very large weights with --deep, and for a wrong dtype.",
        )
    elif not rows:
        yield finding(
            "run.finite",
            "",
            "the draft's logits were not seen: nothing was drafted",
            found="0 rows",
            expected="logits for each drafted token",
            fix="See run.coverage.",
            severity="warning",
        )


def _share_of_steps(answers: Iterable[Answer]) -> tuple[int, int]:
    """(decode steps that carried a draft, decode steps): the first chunk is the prefill's."""
    drafted = steps = 0
    for answer in answers:
        steps += len(answer.chunk_tokens) - 1
        drafted += sum(number > 0 for number in answer.per_step_drafted or ())
    return min(drafted, steps), steps


def check_coverage(case: RunCase) -> Iterator[Told]:
    """run.coverage: a draft on nearly every decode step, after the long prompt too."""
    seen = case.seen
    if not METHODS[case.draft.family].has_weights:
        return  # a method that copies may find nothing to copy
    groups = [("ordinary prompts", list(seen.answers))]
    if seen.long_answer is not None:
        groups.append((f"a prompt of {case.num_long_tokens:,} tokens", [seen.long_answer]))
    for name, answers in groups:
        drafted, steps = _share_of_steps(answers)
        if steps and drafted < _MIN_COVERAGE * steps:
            yield finding(
                "run.coverage",
                "config.json",
                f"on {name} the draft spoke on {drafted} of {steps} decode steps",
                found=f"{drafted / steps:.1%}",
                expected=f"at least {_MIN_COVERAGE:.1%}",
                fix="State max_position_embeddings for the whole context: drafts do not abstain.",
            )
    if seen.long_answer is not None and (case.num_long_tokens or 0) < case.context_tokens - 64:
        yield finding(
            "run.coverage",
            "",
            f"coverage was looked at up to {case.num_long_tokens:,} tokens, the context is"
            f" {case.context_tokens:,}",
            found=f"{case.num_long_tokens:,} tokens",
            fix="Use a target with so many positions, and leave --run-tokens out.",
            severity="note",
        )


def check_zero(case: RunCase) -> Iterator[Told]:
    """run.zero: the target takes at least some first guesses."""
    if not METHODS[case.draft.family].has_weights:
        return  # a method that copies may find nothing to copy
    steps = taken = 0
    for answer in case.seen.answers:
        accepted = answer.per_step_accepted or ()
        steps += len(accepted)
        taken += sum(number > 0 for number in accepted)
    if steps >= _MIN_STEPS and taken < _MIN_POSITION_1 * steps:
        yield finding(
            "run.zero",
            "",
            f"the target took the first guess on {taken} of {steps} steps: the draft contributes"
            " nothing",
            found=f"{taken / steps:.1%}",
            expected=f"more than {_MIN_POSITION_1:.0%} for a draft that was trained",
            fix="Usual causes: another chat template, taps off by one, features after the norm"
            " instead of before, d2t of another vocabulary.",
        )
