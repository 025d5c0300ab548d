"""`cfg.spec`: what a folder in the speculators format fixes by itself, against what is asked."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.draft.envelope import Envelope
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_speculators", "is_same_model"]

_FILE = "config.json"
_SETTINGS = "speculators_config"


def is_same_model(wanted: str, given: str) -> bool:
    """The last part of a name or folder, whatever its case, owner or commit."""
    bare = given.rstrip("/").split("/")[-1].split("@")[0]
    return bare.lower() == wanted.rstrip("/").split("/")[-1].split("@")[0].lower()


def check_speculators(case: Case) -> Iterator[Finding]:
    """Family, K and target of an envelope; and a plain config that also carries its settings."""
    envelope = case.scan.envelope
    if envelope is None:
        if _SETTINGS in case.config:
            yield finding(
                "cfg.spec",
                _FILE,
                "model_type makes this a plain config, which a draft is read as; served by itself"
                f" the folder is read as a speculators one: {_tell_raw(case)}",
                where=_SETTINGS,
                found=_SETTINGS,
                expected="one of the two forms",
                fix=f"Remove {_SETTINGS}; the method belongs in spec.json.",
                severity="warning",
            )
        return
    yield from _check_spec(case, envelope)
    yield from _check_verifier(case, envelope)


def _check_spec(case: Case, envelope: Envelope) -> Iterator[Finding]:
    is_there = "spec.json" in case.scan.names
    if not is_there and not case.scan.is_by_hand:
        yield finding(
            "spec.missing",
            "spec.json",
            f"there is no spec.json; {_FILE} is a speculators envelope of family"
            f" {envelope.family}, K = {envelope.num_speculative_tokens}",
            found="nothing",
            expected=f'{{"family": "{envelope.family}", "num_speculative_tokens":'
            f" {envelope.num_speculative_tokens}}}",
            fix="Add spec.json: a contest asks for it."
            if case.is_contest
            else "Fine as it is; a contest asks for spec.json.",
            severity=None if case.is_contest else "note",
        )
        return
    source = "spec.json" if is_there else "the command line"
    if case.family is not None and case.family != envelope.family:
        yield finding(
            "cfg.spec",
            _FILE,
            f"the envelope is of kind {envelope.kind}, {source} names family {case.family}",
            where="speculators_model_type",
            found=envelope.kind,
            expected=case.family,
            fix="Name the family of the weights.",
        )
    k, own = case.num_speculative_tokens, envelope.num_speculative_tokens
    if k is not None and own is not None and k != own:
        yield finding(
            "cfg.spec",
            _FILE,
            f"the envelope asks for K = {own}, {source} for {k}: Paceline serves {k}, and vLLM"
            f" serves {own} when it is given the folder alone",
            where=f"{_SETTINGS}.proposal_methods[0].speculative_tokens",
            found=own,
            expected=str(k),
            fix="State one K in both.",
            severity="warning",
        )


def _check_verifier(case: Case, envelope: Envelope) -> Iterator[Finding]:
    """A name is weak evidence: without a contest another one only warns."""
    if envelope.verifier is None:
        yield finding(
            "cfg.spec",
            _FILE,
            "the envelope names no target: vLLM serves it beside one, never by itself",
            where=f"{_SETTINGS}.verifier.name_or_path",
            found="nothing",
            expected="the target's name",
            fix="Fine for Paceline, which always names the target.",
            severity="note",
        )
        return
    wanted = given = None
    if case.rules is not None:
        wanted, given = case.rules.target.name, f"the contest {case.rules.name} is for"
    elif case.target is not None:
        wanted, given = case.target.name, "--target is"
    if wanted is None or is_same_model(wanted, envelope.verifier):
        return
    yield finding(
        "cfg.spec",
        _FILE,
        f"the draft is for target {show_value(envelope.verifier, limit=60)}, {given}"
        f" {show_value(wanted, limit=60)}; vLLM serves the former when given the folder alone",
        where=f"{_SETTINGS}.verifier.name_or_path",
        found=envelope.verifier,
        expected=wanted,
        fix="Right if both are the same weights: then write the other name.",
        severity=None if case.rules is not None else "warning",
    )


def _tell_raw(case: Case) -> str:
    """Algorithm, K and verifier, as the settings name them."""
    settings = case.config[_SETTINGS]
    settings = settings if isinstance(settings, dict) else {}
    verifier, proposals = settings.get("verifier"), settings.get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else {}
    named = {
        "algorithm": settings.get("algorithm"),
        "K": first.get("speculative_tokens") if isinstance(first, dict) else None,
        "verifier": verifier.get("name_or_path") if isinstance(verifier, dict) else None,
    }
    told = [f"{key} {show_value(value, limit=60)}" for key, value in named.items() if value]
    return ", ".join(told) or "it names none"
