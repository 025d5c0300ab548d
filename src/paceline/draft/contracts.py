"""What a draft folder of each family must hold: one contract for writer, reader and validator."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.draft.quantized import QUANTIZABLE, quantize_rules, read_scheme
from paceline.draft.rows import Key, Sizes, TensorRule, Variant, build_rules
from paceline.draft.table import FAMILIES
from paceline.errors import DraftError
from paceline.problems import show_value

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = ["SPEC_KEYS", "Contract", "build_contract", "canonical_name", "find_variant"]

# spec.json: every family has the first two; the rest are the family's own settings.
SPEC_KEYS: dict[str, tuple[str, ...]] = {
    name: ("family", *family.spec) for name, family in FAMILIES.items()
}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What vLLM 0.31.0 builds for one config, so what the folder must hold.

    tensors: by canonical name (`midlayer.*` for eagle3, never `layers.0.*`).
    keys: every key config.json may have; config_keys: the same, as key -> type.
    variant, sizes: the row of the table and the numbers; None for a family without weights.
    quantization: the config's quantization_config as it stands; None without one.
    num_target_layers: None without a target.
    """

    family: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    keys: Mapping[str, Key] = field(default_factory=dict)
    spec_keys: tuple[str, ...]
    tensors: Mapping[str, TensorRule] = field(default_factory=dict)
    variant: Variant | None = None
    sizes: Sizes | None = None
    quantization: Any = None
    num_target_layers: int | None = None

    @property
    def config_keys(self) -> dict[str, str]:
        return {key: rule.kind for key, rule in self.keys.items()}

    def rules_for(self, names: Container[str]) -> Mapping[str, TensorRule]:
        """The tensors for a folder that holds these canonical names: packed where it is packed.

        Raises DraftError for a quantisation that is not known, or whose groups do not divide.
        """
        if self.family not in QUANTIZABLE:  # the key itself is refused there
            return self.tensors
        scheme = read_scheme(self.family, {"quantization_config": self.quantization})
        return (
            self.tensors
            if scheme is None
            else quantize_rules(self.family, self.tensors, scheme, names, self.num_target_layers)
        )

    def canonical(self, name: str) -> str:
        """The name under which vLLM 0.31.0 looks for this tensor."""
        if self.variant is None:
            return name
        for pattern, replacement in self.variant.aliases:
            name = re.sub(pattern, replacement, name)
        is_shared_head = self.sizes is not None and "original_lm_head" in self.sizes.flags
        return "lm_head.weight" if is_shared_head and name == "lm_heads.0.weight" else name


def find_variant(family: str, config: Mapping[str, Any]) -> Variant | None:
    """The row for this config: by architecture, else by model_type, else the family's first.

    None for a family without weights. Raises DraftError for an unknown family.
    """
    if family not in FAMILIES:
        raise DraftError(
            f"there is no draft folder for family '{show_value(family)}'",
            where="spec.json: family",
            expected=" or ".join(sorted(FAMILIES)),
        )
    variants = FAMILIES[family].variants
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    for variant in variants:
        if isinstance(name, str) and name in variant.architectures:
            return variant
    for variant in variants:
        if config.get("model_type") in variant.model_types:
            return variant
    return variants[0] if variants else None


def build_contract(
    family: str, config: Mapping[str, Any], target: TargetFacts | None = None
) -> Contract:
    """The contract for one family and one config. Raises DraftError when a size is missing.

    `target` is not needed for shapes: the config states all sizes, and rules that compare the
    two live in `validate`. Only a quantisation that leaves layers plain by number goes by it.
    """
    variant = find_variant(family, config)
    if variant is None:
        return Contract(family=family, spec_keys=SPEC_KEYS[family])
    sizes = variant.read_sizes(config)
    return Contract(
        family=family,
        architectures=variant.architectures,
        model_types=variant.model_types,
        keys=variant.keys,
        spec_keys=SPEC_KEYS[family],
        tensors=build_rules(variant, sizes),
        variant=variant,
        sizes=sizes,
        quantization=config.get("quantization_config"),
        num_target_layers=None if target is None else target.num_hidden_layers,
    )


def canonical_name(name: str) -> str:
    """`layers.0.*` and `midlayer.*` are one layer of an EAGLE-3 draft; we say `midlayer.*`."""
    return f"midlayer.{name[len('layers.0.') :]}" if name.startswith("layers.0.") else name
