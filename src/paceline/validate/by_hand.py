"""A folder without spec.json, judged as vLLM serves it when family and K are given by hand.

It is then no submission: what lies beside the weights and vLLM 0.31.0 does not read only warns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.draft import INDEX_NAME, MASK_EMBEDDING
from paceline.draft.lengths import LENGTHS, is_length
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.files import HARD_LINK
from paceline.validate.report import Finding, finding

__all__ = ["check_by_hand", "soften"]

_SPEC = "spec.json"
# rules about files that no loader opens; links, devices and what cannot be read stay errors
_BESIDE = (
    "fs.allow",
    "fs.code",
    "fs.flat",
    "fs.pickle",
    "fs.quantjson",
    "fs.size",
    "fs.sparse",
    "fs.tokenizer",
)
_SECOND_CONFIG = "hf_quant_config.json"  # read where config.json names no quantisation


def check_by_hand(case: Case) -> Iterator[Finding]:
    """`spec.missing` of a folder whose family and K were given; a contest asks for the file."""
    spec = case.scan.spec or {}
    family, k = spec.get("family"), spec.get("num_speculative_tokens")
    if not case.scan.is_by_hand or family is None or k is None:
        return
    yield finding(
        "spec.missing",
        _SPEC,
        f"there is no spec.json; judged as vLLM serves it by hand: family {show_value(family)},"
        f" K = {show_value(k)}",
        found="nothing",
        expected=f'{{"family": "{show_value(family)}", "num_speculative_tokens": {show_value(k)}}}',
        fix="Add spec.json: a contest asks for it, and the other commands read it."
        if case.is_contest
        else "Fine by hand; a contest asks for it, and the other commands read it.",
        severity=None if case.is_contest else "note",
    )


def soften(case: Case, item: Finding) -> Finding:
    """What refuses a submission and not a folder that is served by hand is then a warning."""
    if not case.scan.is_by_hand:
        return item
    if item.file == _SPEC and item.rule != "spec.missing":
        return replace(item, file="")  # there is none: the command line said it
    if case.is_contest or item.severity != "error":
        return item
    reason = _find_reason(case, item)
    if reason is None:
        return item
    return replace(item, severity="warning", message=f"{item.message} ({reason})")


def _find_reason(case: Case, item: Finding) -> str | None:
    """Why vLLM 0.31.0 serves the folder all the same; None where it may not."""
    if item.rule == "fs.type" and item.message.startswith(HARD_LINK):
        return "by hand that is the server's own matter"
    if item.rule == "st.meta":
        return "vLLM 0.31.0 reads the tensors alone"
    if item.rule == "idx.complete" and item.where == "metadata.total_size":
        return "vLLM 0.31.0 does not read it"
    if item.rule == "idx.complete" and INDEX_NAME not in case.scan.names:
        return "without one vLLM 0.31.0 loads them all"
    if item.rule == "fs.allow" and item.file.endswith(".safetensors"):
        return "vLLM 0.31.0 loads it whatever its name"
    if _ends_early(case, item):
        return "this target is served on without a draft"
    if item.rule in _BESIDE and case.scan.headers and not _is_read(case, item.file):
        return "vLLM 0.31.0 does not open it beside safetensors"
    return None


def _ends_early(case: Case, item: Finding) -> bool:
    """A length below the positions: beyond it vLLM goes on without a draft, which a recurrent
    target does not survive."""
    if item.rule != "cfg.unknown" or item.where not in LENGTHS:
        return False
    is_hybrid = case.target is None or case.target.is_hybrid
    return is_length(case.config.get(item.where)) and not is_hybrid


def _is_read(case: Case, file: str) -> bool:
    if file == MASK_EMBEDDING:
        return case.family == "dflash"
    if file == _SECOND_CONFIG:
        return "quantization_config" not in case.config
    return file in ("config.json", INDEX_NAME, "") or file.endswith(".safetensors")
