"""SPACE.toml: which designs a search tries, and what is assumed of their acceptance."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline.forecast.assume import FACTOR_KEYS, Assumption, parse_assumption
from paceline.forecast.design import FAMILIES
from paceline.forecast.shape import TargetShape
from paceline.problems import show_value
from paceline.records import sha256_bytes

__all__ = ["MAX_DESIGNS", "Space", "list_spaces", "parse_space", "read_space"]

MAX_DESIGNS = 200_000
_SHARES = {"hidden_size", "intermediate_size"}  # may be given as a share of the target's
_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Space:
    """blocks: one a [[designs]] table, setting -> values. sha256: of the file's text."""

    name: str
    blocks: tuple[Mapping[str, tuple[Any, ...]], ...]
    acceptance: Mapping[str, Assumption]
    sha256: str

    @property
    def num_designs(self) -> int:
        return sum(math.prod(len(v) for v in block.values()) for block in self.blocks)

    def combine(self, shape: TargetShape) -> Iterator[dict[str, Any]]:
        """Every combination as the table of a DESIGN.toml; K varies fastest. A window of 0 is
        left out: full attention."""
        for block in self.blocks:
            keys = [key for key in block if key != "num_speculative_tokens"]
            keys.append("num_speculative_tokens")
            for values in itertools.product(*(block[key] for key in keys)):
                table = dict(zip(keys, values, strict=True))
                for key in _SHARES & table.keys():
                    if isinstance(table[key], float):
                        whole = getattr(shape.facts, key) * table[key]
                        table[key] = max(1, round(whole / _MULTIPLE)) * _MULTIPLE
                yield table


def list_spaces() -> tuple[str, ...]:
    """Names of the bundled spaces, sorted."""
    folder = resources.files("paceline.forecast") / "spaces"
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir()))


def read_space(spec: str) -> Space:
    """A bundled space by name, else a file. Raises RecipeError (see parse_space)."""
    if spec in list_spaces():
        folder = resources.files("paceline.forecast") / "spaces"
        return parse_space((folder / f"{spec}.toml").read_text(encoding="utf-8"), where=spec)
    try:
        text = Path(spec).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "is not UTF-8 text"
        raise RecipeError(
            f"the space cannot be read: {why}",
            where=spec,
            expected=f"a TOML file, or {', '.join(list_spaces())}",
        ) from None
    return parse_space(text, where=spec)


def parse_space(text: str, *, where: str = "space") -> Space:
    """Raises RecipeError for a key that means nothing, too many designs, or a setting that would
    be free: one that makes a draft cheaper without saying what it costs in acceptance."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise RecipeError(f"is not valid TOML: {problem}", where=where) from None
    for key in table:
        if key not in ("designs", "acceptance"):
            raise RecipeError(
                f"key '{show_value(key)}' is unknown", where=where, expected="designs, acceptance"
            )
    blocks, assumed = table.get("designs"), table.get("acceptance")
    if not isinstance(blocks, list) or not blocks:
        raise RecipeError("has no [[designs]] table", where=where, expected="one for each family")
    if not isinstance(assumed, dict):
        raise RecipeError(
            "has no [acceptance.FAMILY] table", where=where, expected="one for each family"
        )
    acceptance = {
        family: parse_assumption(value, where=f"{where}: acceptance.{family}")
        for family, value in assumed.items()
    }
    parsed = []
    for number, block in enumerate(blocks, 1):
        parsed.append(_parse_block(block, acceptance, f"{where}: designs {number}"))
    unused = sorted(set(acceptance) - {block["family"][0] for block in parsed})
    if unused:
        raise RecipeError(
            f"[acceptance.{show_value(unused[0])}] has no effect: no design is of that family",
            where=where,
        )
    space = Space(
        name=where,
        blocks=tuple(parsed),
        acceptance=acceptance,
        sha256=sha256_bytes(text.encode("utf-8")),
    )
    if space.num_designs > MAX_DESIGNS:
        raise RecipeError(
            f"the space has {space.num_designs:,} designs",
            where=where,
            expected=f"at most {MAX_DESIGNS:,}",
            fix="Shorten the lists.",
        )
    return space


def _parse_block(
    block: object, acceptance: Mapping[str, Assumption], where: str
) -> dict[str, tuple[Any, ...]]:
    if not isinstance(block, dict):
        raise RecipeError("is not a table", where=where)
    family = block.get("family")
    if not isinstance(family, str) or family not in FAMILIES:
        raise RecipeError(
            "key 'family' is missing" if family is None else f"family is {show_value(family)}",
            where=where,
            expected=f"one of {', '.join(FAMILIES)}",
        )
    if family not in acceptance:
        raise RecipeError(
            f"nothing is assumed of the acceptance of {family}",
            where=where,
            expected=f"a table [acceptance.{family}] with first and decay",
        )
    if "num_speculative_tokens" not in block:
        raise RecipeError("key 'num_speculative_tokens' is missing", where=where, expected="a list")
    axes: dict[str, tuple[Any, ...]] = {"family": (family,)}
    for key, values in block.items():
        if key == "family":
            continue
        if key not in ("num_speculative_tokens", *FAMILIES[family]):
            raise RecipeError(
                f"key '{show_value(key)}' is unknown for family {family}",
                where=where,
                expected=f"only num_speculative_tokens, {', '.join(FAMILIES[family])}",
            )
        listed = values if isinstance(values, list) else [values]
        if not listed or not all(isinstance(one, int | float | str) for one in listed):
            raise RecipeError(f"{key} is {show_value(values)}", where=where, expected="a list")
        if any(isinstance(one, float) for one in listed) and key not in _SHARES:
            raise RecipeError(
                f"{key} has a number with a point", where=where, expected="whole numbers"
            )
        if any(isinstance(one, float) and not 0 < one <= 1 for one in listed):
            raise RecipeError(f"a share in {key} is out of range", where=where, expected="0 to 1")
        if key in FACTOR_KEYS and len(listed) > 1 and key not in acceptance[family].factors:
            raise RecipeError(
                f"{key} varies, and nothing says what it costs in acceptance",
                where=where,
                expected=f"a table {key} in [acceptance.{family}.factors]",
                fix="Without it the cheapest value would always win; give 1.0 where you mean that.",
            )
        axes[key] = tuple(listed)
    return axes
