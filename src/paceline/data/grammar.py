"""The bundled training prompts: templates with slots, expanded the same way on every machine.

`prompts/NAME.json` holds one category: {"templates": [...], "slots": {name: [...]}}; slots of
`prompts/shared.json` are open to all. In a template

    {topic}        a value of the slot; values may hold slots themselves
    {topic.a}      the same, remembered: {topic.a} is the same text again, {topic.b} another
    {3..20}        a whole number from 3 to 20; {3..20.n} is remembered
    {Topic}        the value with a capital first letter
    {a topic}      the value after "a" or "an"

Held-out prompts (`held-out.jsonl`) are written by hand about other things.
"""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from paceline.data.prompt import Prompt
from paceline.errors import DataError
from paceline.records import read_json

__all__ = ["CATEGORIES", "TRAIN_NUM", "expand_prompts"]

CATEGORIES = ("chat", "explain", "write", "code", "math", "extract", "summarise", "plan")
TRAIN_NUM = 16_000
_FOLDER = Path(__file__).parent / "prompts"
_SLOT = re.compile(r"\{(a |A )?(?:(\d+)\.\.(\d+)|([A-Za-z_]+))(?:\.(\w+))?\}")
_MAX_TRIES = 1000


class _Expansion:
    """One prompt in the making: its own random numbers, and the values that it remembers."""

    def __init__(self, slots: dict[str, list[str]], key: str) -> None:
        self.slots = slots
        # random() is the one method whose numbers are promised to be the same in every Python
        self.draw = random.Random(key).random
        self.remembered: dict[tuple[str, str], str] = {}

    def index(self, size: int) -> int:
        return int(self.draw() * size)

    def expand(self, text: str) -> str:
        return _SLOT.sub(self._fill, text)

    def _fill(self, match: re.Match[str]) -> str:
        article, low, high, name, label = match.groups()
        value = self._number(low, high, label) if low else self._value(name.lower(), label)
        if article:
            value = ("an " if value[0].lower() in "aeiou" else "a ") + value
        if (article or name or "")[:1].isupper():
            value = value[0].upper() + value[1:]
        return value

    def _number(self, low: str, high: str, label: str | None) -> str:
        key = (f"{low}..{high}", label or "")
        if label is None or key not in self.remembered:
            self.remembered[key] = str(int(low) + self.index(int(high) - int(low) + 1))
        return self.remembered[key]

    def _value(self, slot: str, label: str | None) -> str:
        if label is not None and (slot, label) in self.remembered:
            return self.remembered[slot, label]
        taken = {value for (name, _), value in self.remembered.items() if name == slot}
        value = self.expand(self._pick(slot, taken))
        if label is not None:
            self.remembered[slot, label] = value
        return value

    def _pick(self, slot: str, taken: set[str]) -> str:
        values = self.slots[slot]
        for _ in range(_MAX_TRIES):
            value = values[self.index(len(values))]
            if value not in taken:
                return value
        raise AssertionError(f"slot {slot!r} has too few values")


@cache
def _read_grammar(category: str) -> tuple[list[str], dict[str, list[str]]]:
    shared = read_json(_FOLDER / "shared.json", error=DataError)
    own = read_json(_FOLDER / f"{category}.json", error=DataError)
    slots: dict[str, list[str]] = {**shared["slots"], **own["slots"]}
    return own["templates"], slots


def expand_prompts(num: int, seed: int = 0) -> list[Prompt]:
    """`num` different prompts, the eight categories in turn; a longer list begins with a shorter.

    Ids are "train-CATEGORY-NNNNN", or "trainSEED-..." for another seed than 0. Raises DataError
    when the grammar cannot make that many different prompts.
    """
    if num < 1:
        raise DataError(f"{num} prompts were asked for", expected="at least 1")
    prefix = "train" if seed == 0 else f"train{seed}"
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for place in range(num):
        category = CATEGORIES[place % len(CATEGORIES)]
        number = place // len(CATEGORIES)
        text = _expand_one(category, number, seed, seen)
        seen.add(text)
        prompts.append(
            Prompt(
                prompt_id=f"{prefix}-{category}-{number:05d}",
                category=category,
                messages=({"role": "user", "content": text},),
                line=place + 1,
            )
        )
    return prompts


def _expand_one(category: str, number: int, seed: int, seen: set[str]) -> str:
    templates, slots = _read_grammar(category)
    for attempt in range(_MAX_TRIES):
        expansion = _Expansion(slots, f"{seed}/{category}/{number}/{attempt}")
        # templates take turns, so that each is used equally often
        text = expansion.expand(templates[(number + attempt) % len(templates)])
        if text not in seen:
            return text
    raise DataError(
        f"the bundled prompts of category {category!r} end at {number}",
        fix="Ask for fewer prompts, or bring a prompt file.",
    )


def grammar_slots(category: str) -> dict[str, Any]:
    """The slots that templates of a category may use."""
    return dict(_read_grammar(category)[1])
