"""A folder without spec.json, as vLLM serves it when family and K are given on its command line.

What the user gives stands in for spec.json; what is not given is told from the folder, as far as
it says so by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.draft.table import FAMILIES
from paceline.draft.uncovered import SERVED_ARCHITECTURES
from paceline.errors import DraftError
from paceline.problems import Problem

__all__ = ["check_by_hand", "complete_spec", "infer_family", "require_no_spec"]

_MAX_NAMES = 20_000
_MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def infer_family(names: Iterable[str]) -> tuple[str, str] | None:
    """(family, the tensor that tells it) from tensor names alone; None when they do not say.

    mtp: names below `mtp.`. medusa: blocks or medusa_heads. draft_model: a whole model's `model.`
    names. eagle3: fc beside a midlayer, or a first layer with hidden_norm. dflash: fc and
    hidden_norm beside plain layers.
    """
    known = set(list(names)[:_MAX_NAMES])
    first = sorted(known)
    for family, pattern in (
        ("mtp", r"mtp\."),
        ("medusa", r"(medusa_heads\.\d|blocks\.\d+\.layers\.|\d+\.0\.linear\.)"),
        ("draft_model", r"model\.(embed_tokens|layers\.\d+\.self_attn)\."),
        ("eagle3", r"(midlayer|layers\.0\.hidden_norm)\."),
    ):
        for name in first:
            if re.match(pattern, name):
                return family, name
    if {"fc.weight", "hidden_norm.weight"} <= known:
        return "dflash", "hidden_norm.weight"
    return None


def complete_spec(
    given: Mapping[str, Any], config: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Any]:
    """What spec.json would say. given: what of family and num_speculative_tokens the user says;
    config: as it stands.

    The family, where it is not given, by the tensors' names, else by the architecture if only one
    family has it. K of an MTP head, where it is not given, as vLLM 0.31.0 takes it: the number of
    its layers. What is not known is left out.
    """
    spec = {key: value for key, value in given.items() if value is not None}
    if "family" not in spec:
        told = infer_family(names)
        family = told[0] if told is not None else _infer_by_architecture(config)
        spec |= {"family": family} if family is not None else {}
    layers = _count_mtp_layers(config)
    if spec.get("family") == "mtp" and layers is not None:
        spec.setdefault("num_speculative_tokens", layers)
    return spec


def _count_mtp_layers(config: Mapping[str, Any]) -> int | None:
    """By either name, in the text config of a model for more than text too."""
    inner = config.get("text_config")
    for level in (config, inner if isinstance(inner, Mapping) else {}):
        for key in _MTP_LAYERS:
            if isinstance(level.get(key), int):
                return int(level[key])
    return None


def _infer_by_architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    families = [
        family.name
        for family in FAMILIES.values()
        if any(name in variant.architectures for variant in family.variants)
        or (isinstance(name, str) and name in SERVED_ARCHITECTURES.get(family.name, ()))
    ]
    return families[0] if len(families) == 1 else None


def check_by_hand(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """`spec.missing`: what is known neither from the user nor from the folder."""
    family = spec.get("family")
    if family is None:
        yield _missing(
            "the tensors and the architecture do not tell the family, and none was given",
            "--family",
            " or ".join(name for name, item in FAMILIES.items() if item.variants),
            "Give --family, or add spec.json.",
        )
    elif "num_speculative_tokens" not in spec:
        yield _missing(
            f"this is a draft of family {family} and K is unknown: nothing in the folder says how"
            " many tokens to draft a step, and vLLM stops without num_speculative_tokens",
            "--k",
            "the K of training",
            "Give --k, or add spec.json.",
        )


def _missing(message: str, where: str, expected: str, fix: str) -> Problem:
    return Problem(
        rule="spec.missing",
        file="spec.json",
        where=where,
        found="nothing",
        expected=expected,
        message=message,
        fix=fix,
    )


def require_no_spec(path: Path, names: Iterable[str]) -> None:
    """Raises DraftError for a folder that says family and K itself."""
    if "spec.json" in names:
        raise DraftError(
            "the folder has a spec.json, which says family and K",
            where=str(path),
            expected="no --family and no --k beside it",
            fix="Leave them out, or change spec.json.",
        )
