"""spec.json: the family, K, and the family's own settings, of which an unknown one is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.draft.check_keys import has_kind
from paceline.draft.rows import Key
from paceline.draft.table import FAMILIES, K
from paceline.draft.uncovered import SERVED_METHODS
from paceline.methods import METHODS
from paceline.problems import Problem, show_value

__all__ = ["check_spec"]


def check_spec(spec: Mapping[str, Any]) -> list[Problem]:
    """The family, K and the family's own settings; an unknown key is an error."""
    family = spec.get("family")
    if isinstance(family, str) and family in SERVED_METHODS:
        return _check_setting("num_speculative_tokens", spec.get("num_speculative_tokens"), K)
    if not isinstance(family, str) or family not in FAMILIES:
        known = isinstance(family, str) and family in METHODS
        return [
            Problem(
                rule="cfg.family",
                file="spec.json",
                where="family",
                found=show_value(family),
                expected=" or ".join(sorted(FAMILIES)),
                message=(
                    f"family '{family}' has no draft folder"
                    if known
                    else f"family {show_value(family)!r} is not one that can be checked here"
                ),
                fix="Name the family that the weights were trained for.",
            )
        ]
    problems = []
    settings = FAMILIES[family].spec
    for key in spec:
        if key not in ("family", *settings):
            problems.append(
                Problem(
                    rule="spec.keys",
                    file="spec.json",
                    where=show_value(key),
                    found=show_value(spec[key]),
                    expected=", ".join(("family", *settings)),
                    message=f"'{show_value(key)}' is not a setting of family {family}",
                    fix="Remove it: the grader would ignore or refuse it.",
                )
            )
    for key, rule in settings.items():
        problems += _check_setting(key, spec.get(key), rule)
    low, high = spec.get("prompt_lookup_min"), spec.get("prompt_lookup_max")
    if not problems and low is not None and high is not None and low > high:
        problems.append(
            Problem(
                rule="spec.keys",
                file="spec.json",
                where="prompt_lookup_min",
                found=show_value(low),
                expected=f"at most prompt_lookup_max = {show_value(high)}",
                message="the shortest n-gram is longer than the longest",
                fix="Swap the two values.",
            )
        )
    return problems


def _check_setting(key: str, value: Any, rule: Key) -> list[Problem]:
    if value is None and not rule.required:
        return []
    if rule.choices:
        if value in rule.choices:
            return []
        words = " or ".join(rule.choices)
        return [
            Problem(
                rule="spec.keys",
                file="spec.json",
                where=key,
                found=show_value(value),
                expected=words,
                message=f"'{key}' is {show_value(value)!r}",
                fix=f"Write {words}, or leave it out.",
            )
        ]
    low = 0.0 if rule.low is None else rule.low
    # the upper end of K is the contest's and the server's matter
    top = None if key == "num_speculative_tokens" else rule.high
    if has_kind(value, rule.kind) and low <= value and (top is None or value <= top):
        return []
    is_count = rule.kind == "int" and low == 1
    return [
        Problem(
            rule="k.range",
            file="spec.json",
            where=key,
            found=show_value(value),
            expected="a whole number of at least 1"
            if is_count
            else f"{rule.kind} from {low:g} to {rule.high:g}",
            message=f"'{key}' is missing"
            if value is None
            else f"'{key}' is not a count"
            if is_count
            else f"'{key}' is out of range",
            fix=f'Write for example "{key}": {3 if is_count else 1}.',
        )
    ]
