"""Runs the rules over one folder. Static by default: names, headers, JSON, vocabulary map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from paceline.draft import build_contract, read_eagle3_sizes, scan_folder
from paceline.errors import DraftError
from paceline.methods import METHODS
from paceline.rules import Limits, Rules, read_rules
from paceline.target import TargetFacts
from paceline.validate.by_hand import check_by_hand, soften
from paceline.validate.case import Case
from paceline.validate.config import check_config
from paceline.validate.content import (
    check_content,
    check_metadata,
    check_rules_target,
    check_spec_fit,
)
from paceline.validate.contract import check_contract, check_mask_token
from paceline.validate.family import (
    check_experts,
    check_family,
    check_medusa_heads,
    check_mtp_k,
    check_path,
)
from paceline.validate.files import check_files, folder_bytes
from paceline.validate.fit import check_fit
from paceline.validate.mask_embedding import check_mask_embedding
from paceline.validate.memory import check_estimate, check_load
from paceline.validate.mtp import check_mtp, find_idle_layers
from paceline.validate.provenance import check_provenance, has_manifest
from paceline.validate.quantization import check_quantization
from paceline.validate.report import Finding, Report, build_report, finding, from_problem
from paceline.validate.rules import list_unchecked
from paceline.validate.speculators import check_speculators
from paceline.validate.taps import check_taps
from paceline.validate.target_quantization import check_target_quantization
from paceline.validate.target_storage import check_target_layers
from paceline.validate.unchecked import DEFAULT_RULES, tell_unchecked
from paceline.validate.uncovered import check_uncovered
from paceline.validate.values import check_values
from paceline.validate.vocabulary import check_token_map, check_vocabulary

__all__ = ["validate_draft"]

_BY_TABLE = ("medusa", "draft_model", "dflash")


def validate_draft(
    draft_path: str | Path,
    *,
    target: TargetFacts | None = None,
    limits: Limits | None = None,
    rules: Rules | None = None,
    deep: bool = False,
    run: bool = False,
    by_hand: Mapping[str, Any] | None = None,
) -> Report:
    """Checks one draft folder and says everything that is wrong with it.

    target: without it, rules that compare the two are left out and named in a note.
    rules: of a contest; without them sizes are compared to emc2-2027's and only warned about.
    limits: of a contest, where its other rules are not at hand.
    deep: reads all values too, and needs sound headers.
    run: whether the caller goes on to start the draft, which this room cannot.
    by_hand: family and num_speculative_tokens of a folder without spec.json, as vLLM gets them on
    its command line; the family, and K of an MTP head, may be left to be told from the folder.
    Raises DraftError only when there is no folder, or by_hand beside a spec.json, never on what the
    folder holds; TypeError for rules and limits together.
    """
    if rules is not None and limits is not None:
        raise TypeError("rules hold limits: give one of the two")
    path = Path(draft_path)
    if not path.is_dir():
        raise DraftError("there is no such draft folder", where=str(path), expected="a folder")
    try:
        case = _build_case(path, target, limits, rules, by_hand)
        missing = [
            name
            for name, is_given in (
                ("target", case.target is not None),
                ("rules", case.is_contest),
                ("deep", deep),
                ("run", run),
                ("fetch", has_manifest(case)),
            )
            if not is_given
        ]
        unchecked = {rule_id for name in missing for rule_id in list_unchecked(name)[0]}
        found = (soften(case, _place(case, item)) for item in _run(case, deep, run))
        return build_report(found, unchecked=sorted(unchecked))
    except OSError as problem:
        raise DraftError(f"cannot be read: {problem.strerror}", where=str(path)) from None


def _build_case(
    path: Path,
    target: TargetFacts | None,
    limits: Limits | None,
    rules: Rules | None,
    by_hand: Mapping[str, Any] | None,
) -> Case:
    limits = limits if rules is None else rules.limits
    scan = scan_folder(path, by_hand=by_hand)
    family = scan.family
    config = scan.config or {}
    sizes = contract = None
    try:
        if family in (None, "eagle3"):
            sizes = read_eagle3_sizes(config, target)
        contract = build_contract(family or "eagle3", config, target)
    except DraftError:
        pass  # told by the rules of the family
    return Case(
        scan=scan,
        family=family,
        config=config,
        sizes=sizes,
        contract=contract,
        target=target,
        limits=limits or _default_limits(),
        is_contest=limits is not None,
        rules=rules,
    )


def _place(case: Case, item: Finding) -> Finding:
    """The rules read the model inside an envelope; an author looks into the file."""
    envelope = case.scan.envelope
    if envelope is None or item.file != "config.json":
        return item
    return replace(item, where=envelope.locate(item.where))


@cache
def _default_limits() -> Limits:
    return read_rules(DEFAULT_RULES).limits


def _run(case: Case, deep: bool, run: bool) -> Iterator[Finding]:
    names = case.scan.names
    if "tokenizer.json" in names and "spec.json" not in names and not case.scan.is_by_hand:
        layers = case.config.get("num_hidden_layers")
        yield finding(
            "fs.missing",
            "",
            "this is a whole model with its tokenizer, not a draft folder",
            found=f"tokenizer.json, no spec.json, num_hidden_layers {layers}",
            expected="config.json, model.safetensors, spec.json, metadata.json",
            fix="Name the draft first and the model with --target. A draft has no tokenizer; a"
            " model that drafts for another is judged with --family draft_model and --k.",
        )
        return
    # With an unknown family the folder is checked as one with weights: more is told, not less.
    has_weights = case.family is None or METHODS[case.family].has_weights
    yield from check_provenance(case, deep=deep)
    yield from check_files(case.scan.path, has_weights=has_weights)
    yield from map(from_problem, case.scan.problems)
    yield from check_by_hand(case)
    yield from check_mask_embedding(case, deep=deep)
    yield from _check_present(case, has_weights)
    yield from _check_bytes(case)
    yield from check_spec_fit(case)
    form = (case.scan.uncovered or find_idle_layers(case)) if has_weights else None
    yield from check_family(case, by_tensors=form is None)
    yield from check_rules_target(case)
    if has_weights:
        yield from check_path(case)
    yield from check_metadata(case)
    if form is not None:
        yield from check_uncovered(case, form)
    else:
        yield from _check_contents(case, has_weights)
    if deep and has_weights:
        yield from _check_deep(case)
    yield from tell_unchecked(case, has_weights, deep, run)


def _check_contents(case: Case, has_weights: bool) -> Iterator[Finding]:
    """Config and tensors against the family's contract, the target and the limits."""
    yield from check_speculators(case)
    if case.scan.config is not None and case.family == "mtp":
        yield from check_mtp(case)
    elif case.scan.config is not None and case.family in _BY_TABLE:
        yield from check_contract(case)
        yield from check_vocabulary(case)
    elif case.scan.config is not None and has_weights:
        yield from _check_sizes(case)
        yield from check_config(case)
        yield from check_fit(case)
        yield from check_taps(case)
        yield from check_mask_token(case)
        yield from check_content(case)
        yield from check_vocabulary(case)
    if case.scan.config is not None and has_weights:
        yield from check_quantization(case)
        yield from check_target_quantization(case)
        yield from check_target_layers(case)
        yield from check_experts(case)
        yield from check_mtp_k(case)
        yield from check_medusa_heads(case)
        yield from check_token_map(case)
        yield from check_estimate(case)
        yield from check_load(case)


def _check_present(case: Case, has_weights: bool) -> Iterator[Finding]:
    names = case.scan.names
    needed = ["metadata.json"]
    if has_weights:
        needed = ["config.json", "model.safetensors", *needed]
    for name in needed:
        shards = name == "model.safetensors" and any(n.endswith(".safetensors") for n in names)
        if name in names or shards or (name == "metadata.json" and not has_weights):
            continue
        mild = name == "metadata.json" and not case.is_contest
        yield finding(
            "fs.missing",
            name,
            f"there is no {name}",
            found="nothing",
            expected="config.json, model.safetensors, spec.json, metadata.json",
            fix="Add a name and how the draft was trained."
            if name == "metadata.json"
            else "Copy the whole folder; an interrupted download lacks files.",
            severity="warning" if mild else None,
        )


def _check_bytes(case: Case) -> Iterator[Finding]:
    total, limit = folder_bytes(case.scan.path), case.limits.max_files_bytes
    if total > limit:
        yield finding(
            "fs.size",
            "",
            f"the folder holds {total:,} bytes",
            found=f"{total:,} bytes",
            expected=f"at most {limit:,} bytes",
            fix="Save the weights as bfloat16, or make the draft smaller.",
            severity=None if case.is_contest else "warning",
        )


def _check_sizes(case: Case) -> Iterator[Finding]:
    try:
        read_eagle3_sizes(case.config, case.target)
    except DraftError as problem:
        yield finding(
            "cfg.missing",
            "config.json",
            problem.what,
            where=problem.where.removeprefix("config.json: "),
            found="nothing, or no size",
            expected=problem.expected,
            fix=problem.fix or "State it as trained.",
        )


def _check_deep(case: Case) -> Iterator[Finding]:
    headers_unsound = any(
        problem.rule.startswith(("st.", "fs.", "lfs.")) for problem in case.scan.problems
    )
    too_large = folder_bytes(case.scan.path) > 4 * case.limits.max_files_bytes
    if headers_unsound or too_large or not case.scan.headers:
        yield finding(
            "not.checked",
            "",
            "weight values were not read: "
            + ("the folder is far too large" if too_large else "the files are not sound"),
            fix="Correct the errors first.",
        )
        return
    yield from check_values(case)
