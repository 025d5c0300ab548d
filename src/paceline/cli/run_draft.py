"""What `paceline validate --run` adds: the draft on its target, in a sandbox, looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.console import say
from paceline.errors import PlanError

if TYPE_CHECKING:
    from paceline.draft import Draft
    from paceline.rules import Rules
    from paceline.serve import Observed, RunCase, SmokeTest, Told
    from paceline.target import TargetFacts
    from paceline.validate import Finding, Report

__all__ = ["add_run"]

_DEFAULT_RULES = "emc2-2027"
_NUM_PROMPTS = 16
_NUM_TOKENS = 32  # answered to each prompt
_NUM_LONG_TOKENS = 24
_MIN_LONG_TOKENS = 64


def add_run(
    report: Report,
    folder: Path,
    target: TargetFacts | None,
    rules: Rules | None,
    *,
    run: bool,
    run_tokens: int | None,
    quiet: bool,
    by_hand: Mapping[str, Any] | None = None,
) -> Report:
    """The report with the `run.*` findings; a draft that failed already is not started.

    run_tokens: length of the long prompt; None is the contest's context, as far as the target has
    positions. quiet: says nothing on the way. by_hand: as in validate_draft. Raises PlanError
    without a target, or for run_tokens without run.
    """
    from paceline.draft import MASK_EMBEDDING, read_draft
    from paceline.rules import read_rules
    from paceline.serve import RunCase, check_observed, observe_draft
    from paceline.validate.report import build_report
    from paceline.validate.rules import list_unchecked

    if not run:
        raise PlanError("--run-tokens has no effect without --run", fix="Give --run too.")
    if target is None:
        raise PlanError("--run needs a target", fix="Give --target.")
    if report.verdict == "fail":
        return _with_unreached(
            report, [], list_unchecked("run")[0], "it has errors", "Correct them first."
        )
    for rule, file, why in (
        ("cfg.contract", "config.json", "it has no contract here"),
        ("fs.pickle", MASK_EMBEDDING, "it needs a pickle"),
    ):
        if any((item.rule, item.file) == (rule, file) for item in report.findings):
            rest = list_unchecked("run")[0]
            return _with_unreached(report, [], rest, why, f"See {rule}.")
    draft = read_draft(folder, by_hand=by_hand)
    rules = rules or read_rules(_DEFAULT_RULES)
    context_tokens = rules.limits.context_tokens
    test = _build_test(target, draft, context_tokens, run_tokens)
    log_path = _log_path(draft)
    on_stage: Callable[[str], None] = (lambda _: None) if quiet else say
    seen = observe_draft(target, draft, test, log_path=log_path, on_stage=on_stage)
    on_stage(f"engine log: {log_path}")
    long = test.long_request
    case = RunCase(
        draft=draft,
        seen=seen,
        context_tokens=context_tokens,
        num_long_tokens=None if long is None else len(long.prompt_ids),
        estimate_bytes=_foresee(report, target, draft, seen, context_tokens),
        is_hybrid=target.is_hybrid,
    )
    found = [_as_finding(told) for told in check_observed(case)]
    unreached, why, fix = _list_unreached(seen), "the run ended early", "See run.boot."
    if seen.error is None:
        more, missed = _look_beside(case, test, target, rules, log_path, on_stage)
        found, unreached = [*found, *more], missed
        why, fix = "the target alone gave no answers", "Read the engine's log."
    if not unreached:
        return build_report([*report.findings, *found], unchecked=report.unchecked)
    return _with_unreached(report, found, unreached, why, fix)


def _look_beside(
    case: RunCase,
    test: SmokeTest,
    target: TargetFacts,
    rules: Rules,
    log_path: Path,
    on_stage: Callable[[str], None],
) -> tuple[list[Finding], tuple[str, ...]]:
    """(findings of the second boot and of the texts, rules for which nothing was seen)."""
    from paceline.eval import find_text_faults
    from paceline.serve import check_repeat, observe_beside
    from paceline.validate.report import finding

    beside = observe_beside(
        target, case.draft, test, case.seen, log_path=log_path, on_stage=on_stage
    )
    found = [_as_finding(told) for told in check_repeat(case, beside)]
    if beside.plain is None:
        return found, ("run.fidelity",)
    faults, num_forks = find_text_faults(beside.plain, case.seen.answers, beside.choices, rules)
    if faults:
        total = len(beside.plain)
        found.append(
            finding(
                "run.fidelity",
                "",
                f"the draft changes the target's text: {'; '.join(faults)}",
                found=f"{num_forks} of {total} answers really fork",
                expected="the target's own text, but for near ties",
                fix="A draft never changes the text: look for a corrupted state (hybrid targets),"
                " and at the engine's version.",
                # one fork of 16 can be the machine's, as two boots of the target would show
                severity="warning" if len(faults) == 1 and num_forks == 1 else None,
            )
        )
    return found, ()


def _as_finding(told: Told) -> Finding:
    from paceline.validate.report import finding

    return finding(
        told.problem.rule,
        told.problem.file,
        told.problem.message,
        where=told.problem.where,
        found=told.problem.found,
        expected=told.problem.expected,
        fix=told.problem.fix,
        severity=told.severity,
    )


def _list_unreached(seen: Observed) -> tuple[str, ...]:
    """Rules for which nothing was seen, because the run ended before."""
    if seen.error is None:
        return ()
    reached = {
        "run.sandbox": seen.isolation,
        "run.boot": seen.error,
        "run.method": seen.facts,
        "run.loaded": seen.memory,
        "run.mem": seen.memory,
        "run.finite": seen.logits,
        "run.coverage": seen.long_answer,
        "run.zero": seen.answers or None,
        "run.fidelity": None,
        "run.repeat": None,
    }
    return tuple(rule for rule, value in reached.items() if value is None)


def _with_unreached(
    report: Report, found: list[Finding], rules: tuple[str, ...], why: str, fix: str
) -> Report:
    from paceline.validate.report import build_report, finding

    told = finding(
        "not.checked",
        "",
        f"not looked at, because {why}: {', '.join(rules)}",
        where="--run",
        expected="all rules",
        fix=fix,
    )
    unchecked = (*report.unchecked, *rules)
    return build_report([*report.findings, *found, told], unchecked=unchecked)


def _build_test(
    target: TargetFacts, draft: Draft, context_tokens: int, run_tokens: int | None
) -> SmokeTest:
    from paceline.data import build_requests, plain_thinking, read_prompts
    from paceline.endpoint import Request, Sampling
    from paceline.serve import SmokeTest

    room = target.max_position_embeddings - _NUM_LONG_TOKENS - draft.num_speculative_tokens - 1
    length = min(context_tokens, room) if run_tokens is None else run_tokens
    if not _MIN_LONG_TOKENS <= length <= room:
        raise PlanError(
            f"a long prompt of {length:,} tokens",
            where="--run-tokens",
            expected=f"{_MIN_LONG_TOKENS} to {room:,}, what the target has positions for",
        )
    sampling = Sampling(max_tokens=_NUM_TOKENS)
    prompts = read_prompts("demo-eval").prompts[:_NUM_PROMPTS]
    thinking = plain_thinking(target)
    many = build_requests(read_prompts("train:400").prompts, target, sampling, thinking=thinking)
    ids = [token for request in many for token in request.prompt_ids]
    ids *= -(-length // len(ids))
    long_sampling = Sampling(max_tokens=_NUM_LONG_TOKENS, ignore_eos=True)
    return SmokeTest(
        requests=tuple(build_requests(prompts, target, sampling, thinking=thinking)),
        long_request=Request(
            request_id="long", prompt_ids=tuple(ids[:length]), sampling=long_sampling
        ),
        context_tokens=context_tokens,
    )


def _log_path(draft: Draft) -> Path:
    """One log a draft, of its last run."""
    from paceline.records import storage_errors
    from paceline.target import cache_folder

    path = cache_folder() / "logs" / f"run-{draft.sha256[:12]}.log"
    with storage_errors(path), contextlib.suppress(FileNotFoundError):
        path.unlink()
    return path


def _foresee(
    report: Report, target: TargetFacts, draft: Draft, seen: Observed, context_tokens: int
) -> int | None:
    """Draft memory in bytes. A hybrid target's pool is no sum of layers: there by the forecast."""
    if not target.is_hybrid:
        return _read_estimate(report)
    design_text = _describe_design(draft)
    if design_text is None or seen.facts is None:
        return None
    from paceline.forecast import CachePlan, measure_memory, parse_design, read_shape

    shape = read_shape(target.path)
    plan = CachePlan(device=seen.facts.platform)
    design = parse_design(design_text, shape)
    return measure_memory(design, shape, context_tokens=context_tokens, plan=plan).total_bytes


def _describe_design(draft: Draft) -> str | None:
    """The draft as a design on paper; None for a family whose folder says more than a design."""
    text = f'family = "{draft.family}"\nnum_speculative_tokens = {draft.num_speculative_tokens}\n'
    if draft.family == "mtp":
        return text
    layers = draft.config.get("num_hidden_layers", 1)
    if draft.family != "medusa" or not layers:
        return None
    one_head = "true" if draft.config.get("original_lm_head") is True else "false"
    return f"{text}num_layers = {layers}\none_head = {one_head}\n"


def _read_estimate(report: Report) -> int | None:
    """What the headers say the draft takes; None for a family without an estimate."""
    for item in report.findings:
        number = item.found.removesuffix(" bytes").replace(",", "")
        if item.rule == "mem.est" and not item.where and number.isdigit():
            return int(number)
    return None
