"""Rules about which family a folder really holds, and about settings of one family alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.draft import infer_family
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = [
    "check_experts",
    "check_family",
    "check_medusa_heads",
    "check_mtp_k",
    "check_path",
]

_EXPERTS = re.compile(
    r"(num_(local_)?experts|n_routed_experts|num_experts_per_tok|moe_intermediate_size"
    r"|first_k_dense_replace|shared_expert_intermediate_size|decoder_sparse_step)"
)
_PATH_WORDS = (
    ("eagle-", "eagle"),
    ("eagle3", "eagle3"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
)
_FROM_PATH = ("mtp", "medusa", "draft_model")  # of other families vLLM keeps what was asked for
_MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "n_predict")


def check_family(case: Case, *, by_tensors: bool = True) -> Iterator[Finding]:
    """`cfg.family`: the declared family, the contest's, and what the tensors say.

    by_tensors: whether the names of the tensors are those of a contract.
    """
    declared = (case.scan.spec or {}).get("family")
    if case.is_contest and case.family and case.family not in case.limits.families:
        yield finding(
            "cfg.family",
            "spec.json",
            f"family {case.family} is not allowed by these rules",
            where="family",
            found=case.family,
            expected=", ".join(case.limits.families),
            fix="Submit a draft of an allowed family.",
        )
    names = [name for tensors in case.scan.tensors_by_file.values() for name in tensors]
    inferred = infer_family(names) if by_tensors else None
    if isinstance(declared, str) and inferred is not None and inferred[0] != declared:
        yield finding(
            "cfg.family",
            "spec.json",
            f"family is {show_value(declared)}, but the tensors are those of {inferred[0]}"
            f" ('{show_value(inferred[1])}' and others)",
            where="family",
            found=declared,
            expected=inferred[0],
            fix="Name the family that the weights were trained for, or export them again.",
        )


def check_path(case: Case) -> Iterator[Finding]:
    """`fs.path`: words in the path from which vLLM takes the method, in the order it looks."""
    if case.family not in _FROM_PATH:
        return
    path = str(case.scan.path.absolute()).lower()
    for word, method in _PATH_WORDS:
        if word in path:
            yield finding(
                "fs.path",
                "",
                f"the path holds '{word}': plain vLLM would run it as {method}, not as"
                f" {case.family}",
                where=word,
                found=word,
                expected="a path without eagle-, eagle3, dflash and dspark",
                fix="Move the folder before serving it by hand; Paceline serves from a neutral"
                " place.",
            )
            return


def check_experts(case: Case) -> Iterator[Finding]:
    """`cfg.moe`: keys that ask for expert layers, at the top level and in text_config."""
    nested = case.config.get("text_config")
    for prefix, level in (("", case.config), ("text_config.", nested)):
        for key, value in level.items() if isinstance(level, dict) else ():
            if _EXPERTS.fullmatch(key) and value not in (None, 0, [], False):
                yield finding(
                    "cfg.moe",
                    "config.json",
                    f"'{key}' asks for expert layers, which a draft of family {case.family} does"
                    " not have; vLLM builds it dense",
                    where=f"{prefix}{key}",
                    found=value,
                    expected="no such key",
                    fix="Remove it; the weights are held against a dense draft.",
                    severity="error" if case.family == "mtp" else None,
                )


def _count(value: object) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None  # type: ignore[return-value]


def check_mtp_k(case: Case) -> Iterator[Finding]:
    """`cfg.mtp_div`: vLLM stops unless K is at most the MTP layers, or a multiple of them."""
    if case.family != "mtp":
        return
    k = case.num_speculative_tokens
    for key in _MTP_LAYERS:
        layers = _count(case.config.get(key))
        if layers is None or k is None or k <= layers:
            continue
        if k % layers:
            yield finding(
                "cfg.mtp_div",
                "spec.json",
                f"K = {k} is not a multiple of {layers} MTP layers; vLLM refuses it",
                where="num_speculative_tokens",
                found=k,
                expected=f"1 to {layers}, or a multiple of {layers}",
                fix="Choose K up to the number of layers, or a multiple of it.",
            )
        elif layers > 1:
            yield finding(
                "cfg.mtp_div",
                "spec.json",
                f"K = {k} runs the {layers} MTP layers {k // layers} times; the later tokens were"
                " trained for only if training did the same",
                where="num_speculative_tokens",
                found=k,
                expected=f"at most {layers}",
                fix=f"Compare with K = {layers}.",
                severity="warning",
            )
        return


def check_medusa_heads(case: Case) -> Iterator[Finding]:
    """`cfg.medusa`: heads against K, and one key each for heads and layers."""
    if (case.scan.spec or {}).get("family") != "medusa":
        return
    counted = [key for key in case.config if "num" in key]
    for word, right in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        keys = [key for key in counted if word in key and (word == "heads" or "heads" not in key)]
        if len(keys) > 1:
            shown = ", ".join(show_value(key) for key in keys[:4])
            yield finding(
                "cfg.medusa",
                "config.json",
                f"{len(keys)} keys hold 'num' and '{word}' ({shown}); vLLM takes the last of them"
                f" for the number of {word}",
                where=keys[-1],
                found=shown,
                expected=f"{right} alone",
                fix="Remove the others.",
            )
    heads, k = _count(case.config.get("num_heads")), case.num_speculative_tokens
    if heads is not None and k is not None and heads != k:
        yield finding(
            "cfg.medusa",
            "spec.json",
            f"{heads} heads for K = {k} drafted tokens"
            + ("; the spare ones are ignored" if heads > k else "; the missing ones stay random"),
            where="num_speculative_tokens",
            found=k,
            expected=str(heads),
            fix="Set num_speculative_tokens to the number of heads that were trained.",
            severity="warning" if heads > k else None,
        )
