"""Rules about the tapped target layers of an EAGLE-3 draft.

vLLM 0.31.0: id i is the residual stream after i layers (0: embeddings; the layer count: after the
last layer, before the final norm).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.draft import default_aux_layer_ids, read_aux_layer_ids
from paceline.draft.taps import check_tapped_layers
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding, from_problem

__all__ = ["check_taps"]

_FILE = "config.json"
_KEY = "eagle_aux_hidden_state_layer_ids"


def check_taps(case: Case) -> Iterator[Finding]:
    """All of `cfg.aux`."""
    config = case.config
    nested = config.get("eagle_config")
    inner: dict[str, Any] = nested if isinstance(nested, dict) else {}
    if inner.get("use_aux_hidden_state") is False:
        yield finding(
            "cfg.aux",
            _FILE,
            "a draft that taps no layer is not an EAGLE-3 draft",
            where="eagle_config.use_aux_hidden_state",
            found="false",
            expected="true, or no key",
            fix="Remove the key.",
        )
    ids = read_aux_layer_ids(config)
    where = _KEY if config.get(_KEY) else f"eagle_config.{_KEY}"
    if ids is None:
        yield from _check_default(case)
        return
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        return  # reported as json.type
    yield from _check_ids(case, ids, where)
    yield from map(from_problem, check_tapped_layers(config))


def _check_ids(case: Case, ids: tuple[int, ...], where: str) -> Iterator[Finding]:
    top = case.target.num_hidden_layers if case.target else None
    for layer in ids:
        if layer < 0 or (top is not None and layer > top):
            limit = f"0 to {top}" if top is not None else "0 or more"
            yield finding(
                "cfg.aux",
                _FILE,
                f"the draft taps layer {layer}, but the target has {top} layers"
                if top is not None
                else f"the draft taps layer {layer}",
                where=where,
                found=layer,
                expected=limit,
                fix="vLLM would never fill that input. Check whether ids were counted from 1.",
            )
        elif top is not None and layer == top:
            yield finding(
                "cfg.aux",
                _FILE,
                f"layer {layer} is the final boundary: the residual stream after the last layer,"
                " before the final norm",
                where=where,
                found=layer,
                expected="what training used",
                fix="Right if training took the state before the norm.",
                severity="note",
            )


def _check_default(case: Case) -> Iterator[Finding]:
    top = case.target.num_hidden_layers if case.target else None
    default = "{2, n // 2, n - 3} of the target's n layers"
    ids: tuple[int, ...] | None = None
    if top is not None:
        ids = default_aux_layer_ids(top)
        default = str(list(ids))
    yield finding(
        "cfg.aux",
        _FILE,
        f"the config does not say which target layers are tapped; vLLM would take {default}",
        where=_KEY,
        found="nothing",
        expected="the ids of training, ascending",
        fix="State them: a wrong guess only shows as low acceptance.",
        severity="warning",
    )
    built = case.config.get("num_aux_hidden_states")
    built = 3 if built is None else built
    if ids is not None and (built != len(ids) or min(ids) < 0):
        yield finding(
            "cfg.aux",
            _FILE,
            f"vLLM's default would tap {list(ids)}, but build fc for {built} layers, and stop at"
            " its first step",
            where=_KEY,
            found=list(ids),
            expected=f"{built} different layers",
            fix="State the ids.",
        )
