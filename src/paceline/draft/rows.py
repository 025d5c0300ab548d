"""The form of the one table of contracts: rows for config keys, sizes and tensors.

A shape is written in the words of config.json: `("heads * head_dim", "2 * hidden_size")`. The
table itself is in `table.py`; its keys are in `keys.py`, its tensors in `layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import DraftError
from paceline.problems import show_value

__all__ = [
    "FLOATS",
    "Key",
    "Row",
    "Sizes",
    "TensorRule",
    "Variant",
    "build_rules",
    "multiply",
    "read_size",
    "spell",
]

FLOATS = ("BF16", "F16", "F32")
_MAX_REPEATS = 64


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of config.json.

    kind: "int", "number", "float", "bool", "str", "object", "labels" (whole numbers to texts), "str
    list", "int list" or "int or int list". required: vLLM stops without it, or takes a default that
    fits no draft. low, high: the range of a number. choices: the values that vLLM builds as they
    are meant. nullable: null reads as "not stated". unread: what 0.31.0 does with the key instead
    of what it says; a finding, except for the values in harmless. default: what 0.31.0 takes for a
    missing key; is_told: its absence is a finding. rule: id of the rule that a wrong value breaks.
    """

    kind: str
    required: bool = False
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    nullable: bool = True
    unread: str = ""
    harmless: tuple[Any, ...] = ()
    default: str = ""
    is_told: bool = False
    rule: str = "cfg.value"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What vLLM takes from one config, defaults filled in: numbers by name, and flags that hold.

    words: how a number is called in a message, where its name alone would mislead.
    """

    numbers: Mapping[str, int]
    flags: frozenset[str] = frozenset()
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor, or one for each of `each` (sizes): `{i}` counts the first, `{j}` the second.

    first: where {i} starts. shape: products of sizes; also: other shapes that vLLM takes.
    when: a flag without which vLLM has no place for the tensor ("!flag": with which).
    needs: "always", "never", or a flag. unread: vLLM drops the tensor; a finding.
    is_linear: a quantised draft may hold it in another form. is_skipped: vLLM passes over the name,
    whatever the tensor holds.
    """

    name: str
    shape: tuple[str, ...]
    also: tuple[tuple[str, ...], ...] = ()
    dtypes: tuple[str, ...] = FLOATS
    each: tuple[str, ...] = ()
    first: int = 0
    when: str = ""
    needs: str = "always"
    unread: str = ""
    if_missing: str = ""
    fix_missing: str = ""
    is_linear: bool = False
    is_skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One tensor of one config. rows / columns say in words where the two sizes come from.

    also: other shapes that vLLM 0.31.0 loads as this one. unread: it may be there, and vLLM drops
    it. is_linear: a quantised draft may hold it in another form. is_skipped: another shape or dtype
    changes nothing.
    """

    shape: tuple[int, ...]
    also: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True
    rows: str = ""
    columns: str = ""
    if_missing: str = ""
    fix_missing: str = ""
    unread: str = ""
    is_linear: bool = False
    is_skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One architecture of a family: what its config may say and what its weights are.

    architectures: names in config.json that reach this class; the first is what we write.
    nested: key -> the keys of that object. aliases: (pattern, replacement) for names that vLLM
    reads as another, in order. shared: what the draft takes from the target, in words ("" for
    nothing). never: keys that vLLM would turn into something else, with what happens.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    keys: Mapping[str, Key]
    nested: Mapping[str, Mapping[str, Key]] = field(default_factory=dict)
    read_sizes: Callable[[Mapping[str, Any]], Sizes]
    rows: tuple[Row, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    shared: str = ""
    never: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""


def read_size(
    config: Mapping[str, Any], key: str, default: int | None = None, *, why: str = ""
) -> int:
    """A size from 1 to 2**26; raises DraftError for a missing or senseless one."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**26:
        raise DraftError(
            f"'{key}' is missing" if value is None else f"'{key}' is {show_value(value)}",
            where=f"config.json: {key}",
            expected="a whole number from 1 to 67,108,864",
            fix=why or "State it as trained: vLLM would take a default of another model.",
        )
    return value


def multiply(expression: str, sizes: Sizes) -> int:
    """The number that a product such as "2 * hidden_size" stands for."""
    product = 1
    for factor in expression.split(" * "):
        product *= int(factor) if factor.isdigit() else sizes.numbers[factor]
    return product


def spell(expression: str, sizes: Sizes) -> str:
    """The same product for a reader: "2 x hidden_size 576"."""
    return " x ".join(
        factor if factor.isdigit() else sizes.words.get(factor, f"{factor} {sizes.numbers[factor]}")
        for factor in expression.split(" * ")
    )


def _holds(flag: str, sizes: Sizes) -> bool:
    return flag[1:] not in sizes.flags if flag.startswith("!") else flag in sizes.flags


def build_rules(variant: Variant, sizes: Sizes) -> dict[str, TensorRule]:
    """Every tensor that one config has a place for, by name."""
    rules: dict[str, TensorRule] = {}
    for row in variant.rows:
        if row.when and not _holds(row.when, sizes):
            continue
        rule = _build_rule(row, sizes)
        for name in _names(row, sizes):
            rules[name] = rule
    return rules


def _build_rule(row: Row, sizes: Sizes) -> TensorRule:
    words = [spell(part, sizes) for part in row.shape]
    return TensorRule(
        shape=tuple(multiply(part, sizes) for part in row.shape),
        also=tuple(tuple(multiply(part, sizes) for part in shape) for shape in row.also),
        dtypes=row.dtypes,
        required=row.needs == "always" or (row.needs != "never" and _holds(row.needs, sizes)),
        rows=words[0],
        columns=words[1] if len(words) > 1 else "",
        if_missing=row.if_missing.format_map(sizes.numbers),
        fix_missing=row.fix_missing,
        unread=row.unread,
        is_linear=row.is_linear,
        is_skipped=row.is_skipped,
    )


def _names(row: Row, sizes: Sizes) -> Iterator[str]:
    counts = [min(sizes.numbers[size], _MAX_REPEATS) for size in row.each]
    if not counts:
        yield row.name
        return
    for index in range(row.first, counts[0]):
        name = row.name.replace("{i}", str(index))
        if len(counts) == 1:
            yield name
        else:
            yield from (name.replace("{j}", str(inner)) for inner in range(counts[1]))
