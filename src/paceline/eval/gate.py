"""The fidelity gate: an arm whose text is not the target's is withheld from scoring.

A corrupted state looks like a great draft: loops are easy to guess, so acceptance and speed rise.
No ratio of such an arm means anything, so its score is not a low one but none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.rules import Rules

__all__ = ["find_withheld"]

Fidelity = Mapping[str, Any]


def find_withheld(fidelity: Mapping[str, Fidelity] | None, rules: Rules) -> dict[str, list[str]]:
    """Arm -> why it is withheld from scoring; arms that pass are not in it.

    fidelity: as result.json holds it. Its entry "plain", where there is one, is the target against
    itself on another server: what that differs by is allowed on top.
    """
    found = {}
    floor = (fidelity or {}).get("plain")
    for name, own in (fidelity or {}).items():
        reasons = [] if name == "plain" else _find_reasons(own, floor, rules)
        if reasons:
            found[name] = reasons
    return found


def _find_reasons(own: Fidelity, floor: Fidelity | None, rules: Rules) -> list[str]:
    total = own["num_texts"]
    if not total:
        return []
    limits, reasons = rules.fidelity, []
    forks = own["real_fork"]
    if forks is not None:
        allowed = limits.max_real_fork_share + _floor_share(floor)
        if forks / total > allowed:
            reasons.append(f"its text is not the target's: {forks} of {total} answers really fork")
    extra = _extra_loops(own)
    allowed = limits.max_extra_looping_share
    if floor is not None and floor["num_texts"]:
        allowed += max(0, _extra_loops(floor)) / floor["num_texts"]
    if extra / total > allowed:
        reasons.append(f"it loops in {extra} of {total} answers where the target does not")
    if "differences" not in own:  # measured before texts were screened by more than that
        return reasons
    length = own["loops"]["plain"]["mean_num_tokens"]
    for key, limit, sign, text in (
        ("nll_nats", limits.max_extra_nll_nats, 1, "nats a token less likely under the target"),
        ("num_tokens", limits.max_length_change * length, 1, "tokens longer"),
        ("num_tokens", limits.max_length_change * length, -1, "tokens shorter"),
        ("eos_share", limits.max_eos_change, 1, "of the answers more end by themselves"),
        ("eos_share", limits.max_eos_change, -1, "of the answers fewer end by themselves"),
        ("distinct_2", limits.max_distinct_2_drop, -1, "less varied (distinct pairs of tokens)"),
    ):
        excess = _find_excess(own, floor, key, limit, sign)
        if excess is not None:
            reasons.append(f"its text is on average {excess:.2f} {text}")
    return reasons


def _floor_share(floor: Fidelity | None) -> float:
    if floor is None or not floor["num_texts"] or floor["real_fork"] is None:
        return 0.0
    return float(floor["real_fork"] / floor["num_texts"])


def _extra_loops(own: Fidelity) -> int:
    return int(own["loops"]["arm"]["num_looping"] - own["loops"]["plain"]["num_looping"])


def _find_excess(
    own: Fidelity, floor: Fidelity | None, key: str, limit: float, sign: int
) -> float | None:
    """How far off in the direction of `sign`, where that is beyond the limit and chance."""
    found = own["differences"][key]
    if found["half_width"] is None:
        return None
    off = sign * found["mean"]
    usual = 0.0
    if floor is not None and floor["differences"][key]["mean"] is not None:
        usual = max(0.0, sign * floor["differences"][key]["mean"])
    return float(off) if off > limit + usual and off > found["half_width"] else None
