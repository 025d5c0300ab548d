"""Rules about spec.json, metadata.json and the tensors as their headers tell them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.draft import canonical_name, check_tensors, count_parameters
from paceline.methods import MAX_NUM_SPECULATIVE_TOKENS
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding, from_problem
from paceline.validate.speculators import is_same_model

__all__ = [
    "check_content",
    "check_metadata",
    "check_parameters",
    "check_rules_target",
    "check_spec_fit",
]

_TEXT_KEYS = ("name", "team", "description", "license")
_OBJECT_KEYS = ("trained", "served", "quantized", "reshaped")
_FINGERPRINTS = {
    "tokenizer_sha256": "tokenizer",
    "chat_template_sha256": "chat template",
    "weights_fingerprint": "weights",
}
_THINKING = ("none", "on", "off")
# No contest has published a largest K. Past this, extra tokens cost time and rarely hold.
_UNUSUAL_K = 16


def check_spec_fit(case: Case) -> Iterator[Finding]:
    """K against what is sensible and what can be served."""
    k = case.num_speculative_tokens
    if k is not None and k > _UNUSUAL_K:
        yield finding(
            "k.range",
            "spec.json",
            f"K = {k} drafted tokens a step is "
            + (
                "too large"
                if k > MAX_NUM_SPECULATIVE_TOKENS
                else "unusually large; late tokens rarely hold"
            ),
            where="num_speculative_tokens",
            found=k,
            expected=f"1 to {_UNUSUAL_K}",
            fix="Most drafts are fastest between 2 and 7.",
            severity="error" if k > MAX_NUM_SPECULATIVE_TOKENS else "warning",
        )


def check_rules_target(case: Case) -> Iterator[Finding]:
    """`rules.target`: a note when the contest is about another model than --target."""
    if case.rules is None or case.target is None:
        return
    wanted, given = case.rules.target.name, case.target.name
    if not is_same_model(wanted, given):
        yield finding(
            "rules.target",
            "",
            f"rules {case.rules.name} are for target {wanted}; --target is '{show_value(given)}'",
            where="--target",
            found=given,
            expected=wanted,
            fix="Give --target the contest's model for the verdict that counts.",
        )


def check_metadata(case: Case) -> Iterator[Finding]:
    """What metadata.json records, and whether it names this target."""
    metadata = case.scan.metadata
    if metadata is None:
        return
    file = "metadata.json"
    for key, value in metadata.items():
        if key not in (*_TEXT_KEYS, *_OBJECT_KEYS):
            yield finding(
                "meta.keys",
                file,
                f"'{show_value(key)}' is not a known field",
                where=key,
                found=value,
                expected=", ".join((*_TEXT_KEYS, *_OBJECT_KEYS)),
                fix="Put what concerns training under 'trained'.",
            )
            continue
        right = isinstance(value, str if key in _TEXT_KEYS else dict)
        if not right and value is not None:
            yield finding(
                "json.type",
                file,
                f"'{key}' has the wrong type",
                where=key,
                found=value,
                expected="text" if key in _TEXT_KEYS else "an object",
                fix="Correct it.",
            )
    if not metadata.get("name"):
        yield finding(
            "meta.keys",
            file,
            "the draft has no name",
            where="name",
            found="nothing",
            expected="a short name",
            fix='Add "name".',
            severity="warning" if case.is_contest else None,
        )
    trained = metadata.get("trained")
    if isinstance(trained, dict):
        yield from _check_thinking(trained)
        yield from _check_trained(case, trained)


def _check_thinking(trained: Mapping[str, Any]) -> Iterator[Finding]:
    """`meta.thinking`."""
    thinking = trained.get("thinking")
    if thinking not in _THINKING:
        yield finding(
            "meta.thinking",
            "metadata.json",
            "the record does not say whether the training answers contain thinking",
            where="trained.thinking",
            found=thinking,
            expected=", ".join(_THINKING),
            fix="Record it: acceptance differs several times between the modes.",
            severity="note" if thinking is None else None,
        )


def _check_trained(case: Case, trained: Mapping[str, Any]) -> Iterator[Finding]:
    """`meta.target`."""
    if case.target is None:
        return
    record = trained.get("target")
    record = record if isinstance(record, dict) else trained
    for key, what in _FINGERPRINTS.items():
        theirs, own = record.get(key), getattr(case.target, key)
        if theirs is not None and own is not None and theirs != own:
            yield finding(
                "meta.target",
                "metadata.json",
                f"the draft was trained for another target: its {what}"
                f" {'are not those' if what == 'weights' else 'is not that'} of"
                f" '{case.target.name}'",
                where=f"trained.target.{key}",
                found=show_value(theirs, limit=24),
                expected=show_value(own, limit=24),
                fix="Point --target at the model it was trained for, or expect low acceptance.",
            )


def check_content(case: Case) -> Iterator[Finding]:
    """Tensors against the contract, shared layers, and the number of parameters."""
    if case.contract is None or case.sizes is None:
        return
    files = case.scan.tensors_by_file
    if files:
        yield from map(from_problem, check_tensors(case.contract, files))
    for file, tensors in files.items():
        # scales of FP8 and int8 weights are float32 in vLLM too
        wide = [
            name
            for name, tensor in tensors.items()
            if tensor.dtype == "F32" and not name.endswith("weight_scale")
        ]
        if wide:
            yield finding(
                "ten.dtype",
                file,
                f"{len(wide)} tensors are float32; vLLM casts them when it loads",
                where=wide[0],
                found="F32",
                expected="BF16",
                fix="Save them as bfloat16 to halve the file.",
                severity="warning",
            )
    names = {canonical_name(name): file for file, tensors in files.items() for name in tensors}
    yield from _check_head(case, names)
    yield from _check_embeddings(case, names)
    yield from check_parameters(case)


def _check_head(case: Case, names: Mapping[str, str]) -> Iterator[Finding]:
    """`ten.lm_head`. names: canonical name -> file."""
    files = case.scan.tensors_by_file
    assert case.sizes is not None
    if files and "lm_head.weight" not in names and not case.sizes.has_draft_vocabulary:
        yield finding(
            "ten.lm_head",
            next(iter(files)),
            "there is no lm_head.weight: vLLM 0.31.0 will borrow the target's head",
            where="lm_head.weight",
            found="nothing",
            expected="the target's own rows",
            fix="Right if training used the target's head; another engine may not borrow it.",
            severity="note" if _says_shared(case, "lm_head") else None,
        )


def _check_embeddings(case: Case, names: Mapping[str, str]) -> Iterator[Finding]:
    """`ten.embed`. names: canonical name -> file."""
    if "embed_tokens.weight" in names and not _says_shared(case, "embeddings"):
        yield finding(
            "ten.embed",
            names["embed_tokens.weight"],
            "the draft ships its own embeddings; vLLM keeps both unless they equal the target's"
            " bit for bit",
            where="embed_tokens.weight",
            found="a tensor of its own",
            expected="no tensor: the target's embeddings are shared",
            fix="Leave it out unless it was trained; --deep with --target compares the values.",
        )


def check_parameters(case: Case) -> Iterator[Finding]:
    """The number of parameters against the limit."""
    files = case.scan.tensors_by_file
    held = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    total = count_parameters(held, case.config)
    limit = case.limits.max_parameters
    if total > limit:
        yield finding(
            "ten.params",
            next(iter(files)),
            f"the draft has {total:,} parameters",
            found=f"{total:,}",
            expected=f"at most {limit:,}",
            fix="Make it smaller.",
            severity=None if case.is_contest else "warning",
        )


def _says_shared(case: Case, key: str) -> bool:
    """True when the training record says that the draft uses the target's own layer."""
    trained = (case.scan.metadata or {}).get("trained")
    value = trained.get(key) if isinstance(trained, dict) else None
    return isinstance(value, str) and "shared" in value
