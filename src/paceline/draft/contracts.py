"""What a draft folder of each family must hold: one contract for writer, reader and validator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.draft.eagle3 import (
    EAGLE3_ARCHITECTURES,
    EAGLE3_CONFIG_KEYS,
    EAGLE3_MODEL_TYPES,
    TensorRule,
    build_eagle3_rules,
    explain_shape,
    read_eagle3_sizes,
)
from paceline.draft.mtp import (
    MTP_ARCHITECTURES,
    MTP_CONFIG_KEYS,
    MTP_MODEL_TYPES,
    build_mtp_rules,
    read_mtp_sizes,
)
from paceline.errors import DraftError
from paceline.methods import METHODS
from paceline.problems import Problem, show_value
from paceline.safetensors_header import TensorInfo

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = ["SPEC_KEYS", "Contract", "build_contract", "canonical_name", "check_tensors"]

_MAX_PROBLEMS = 60

# spec.json: every family has the first two; the rest are the family's own settings.
SPEC_KEYS: dict[str, tuple[str, ...]] = {
    "eagle3": ("family", "num_speculative_tokens"),
    "mtp": ("family", "num_speculative_tokens"),
    "ngram": ("family", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What vLLM 0.31.0 builds for one config, so what the folder must hold.

    tensors: by canonical name (`midlayer.*`, never `layers.0.*`).
    config_keys: every key config.json may have, with its type ("int", "str list", …).
    """

    family: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    config_keys: Mapping[str, str] = field(default_factory=dict)
    spec_keys: tuple[str, ...]
    tensors: Mapping[str, TensorRule] = field(default_factory=dict)


def build_contract(
    family: str, config: Mapping[str, Any], target: TargetFacts | None = None
) -> Contract:
    """The contract for one family and one config. Raises DraftError when a size is missing.

    `target` is not needed for shapes: the config states all sizes, and rules that compare the
    two live in `validate`.
    """
    if family not in SPEC_KEYS:
        raise DraftError(
            f"there is no draft folder for family '{show_value(family)}'",
            where="spec.json: family",
            expected=" or ".join(sorted(SPEC_KEYS)),
        )
    if not METHODS[family].has_weights:
        return Contract(family=family, spec_keys=SPEC_KEYS[family])
    if family == "mtp":
        return Contract(
            family=family,
            architectures=MTP_ARCHITECTURES,
            model_types=MTP_MODEL_TYPES,
            config_keys=MTP_CONFIG_KEYS,
            spec_keys=SPEC_KEYS[family],
            tensors=build_mtp_rules(read_mtp_sizes(config)),
        )
    sizes = read_eagle3_sizes(config, target)
    return Contract(
        family=family,
        architectures=EAGLE3_ARCHITECTURES,
        model_types=EAGLE3_MODEL_TYPES,
        config_keys=EAGLE3_CONFIG_KEYS,
        spec_keys=SPEC_KEYS[family],
        tensors=build_eagle3_rules(sizes),
    )


def canonical_name(name: str) -> str:
    """`layers.0.*` and `midlayer.*` are one layer for vLLM; we say `midlayer.*`."""
    return f"midlayer.{name[len('layers.0.') :]}" if name.startswith("layers.0.") else name


def check_tensors(
    contract: Contract, files: Mapping[str, Mapping[str, TensorInfo]]
) -> list[Problem]:
    """Names, shapes and dtypes of all tensors against the contract. `files`: file -> its tensors.

    vLLM 0.31.0 loads an eagle3 draft without its fc or down_proj silently, so this is the only
    check there is.
    """
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    main_file = min(files, default="model.safetensors")
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            canonical = canonical_name(name)
            if canonical in seen:
                problems.append(_twice(file, name, seen[canonical]))
                continue
            seen[canonical] = f"{file}: {name}"
            rule = contract.tensors.get(canonical)
            if rule is None:
                problems.append(_extra(file, name, contract))
            else:
                problems.extend(_check_one(file, tensor, canonical, rule))
    for name, rule in contract.tensors.items():
        if rule.required and name not in seen:
            problems.append(_missing(main_file, name, rule))
    return problems[:_MAX_PROBLEMS]


def _check_one(file: str, tensor: TensorInfo, canonical: str, rule: TensorRule) -> list[Problem]:
    problems = []
    if tensor.shape != rule.shape:
        problems.append(
            Problem(
                rule="ten.shape",
                file=file,
                where=tensor.name,
                found=str(list(tensor.shape)),
                expected=str(list(rule.shape)),
                message=explain_shape(canonical, tensor.shape, rule),
                fix="Make config.json state the sizes that the weights were trained with.",
            )
        )
    if tensor.dtype not in rule.dtypes:
        problems.append(
            Problem(
                rule="ten.dtype",
                file=file,
                where=tensor.name,
                found=tensor.dtype,
                expected=" or ".join(rule.dtypes),
                message=f"tensor '{tensor.name}' has dtype {tensor.dtype}",
                fix=f"Save it as {rule.dtypes[0]}.",
            )
        )
    return problems


def _twice(file: str, name: str, earlier: str) -> Problem:
    return Problem(
        rule="idx.complete",
        file=file,
        where=name,
        found=f"also in {earlier}",
        expected="each tensor once",
        message=f"tensor '{name}' is there twice",
        fix="Keep one copy; 'layers.0.' and 'midlayer.' are the same layer.",
    )


def _extra(file: str, name: str, contract: Contract) -> Problem:
    bare = canonical_name(name.removeprefix("model."))
    if bare != name and bare in contract.tensors:
        fix = f"Name it '{bare}': vLLM adds 'model.' itself."
    elif contract.family == "mtp" and name.endswith(
        ("embed_tokens.weight", "lm_head.weight", "d2t")
    ):
        fix = "Remove it: vLLM gives an MTP head the target's embeddings, output and vocabulary."
    elif name == "d2t":
        fix = "Remove it: with the full vocabulary vLLM has no place for it and refuses the file."
    else:
        fix = "Remove it, or set the config key that makes vLLM use it."
    return Problem(
        rule="ten.extra",
        file=file,
        where=name,
        found=name,
        expected="only tensors that vLLM uses for this config",
        message=f"tensor '{name}' has no place in this {contract.family} draft",
        fix=fix,
    )


def _missing(file: str, name: str, rule: TensorRule) -> Problem:
    return Problem(
        rule="ten.missing",
        file=file,
        where=name,
        found="nothing",
        expected=f"{rule.dtypes[0]} {list(rule.shape)}",
        message=rule.if_missing or f"tensor '{name}' is missing; vLLM would serve random numbers",
        fix=rule.fix_missing or "Export the draft again with all of its tensors.",
    )
