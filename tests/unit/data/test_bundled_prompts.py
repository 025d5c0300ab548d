from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import paceline.data
from paceline.data import CATEGORIES, contamination, expand_prompts, read_prompts
from paceline.data.grammar import _SLOT, grammar_slots
from paceline.errors import DataError

FOLDER = Path(paceline.data.__file__).parent / "prompts"


def test_train_is_balanced_different_and_the_same_everywhere() -> None:
    prompts = read_prompts("train").prompts
    texts = [prompt.messages[0]["content"] for prompt in prompts]
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 2000)
    assert len(set(texts)) == len({prompt.prompt_id for prompt in prompts}) == 16_000
    assert read_prompts("train:24").prompts == prompts[:24]
    assert read_prompts("demo-train").prompts == prompts[:96]
    assert {p.messages[0]["content"] for p in expand_prompts(24, seed=1)} != set(texts[:24])
    # pinned: the demo's numbers and the reference draft rest on these very prompts
    assert read_prompts("train:800").sha256 == (
        "85e2d41e7391b8bb6243112cf39084fa844cb0c09ec3c7eba03c1bdda192bd71"
    )


def test_every_template_is_complete_and_nothing_is_left_unfilled() -> None:
    for category in CATEGORIES:
        own = json.loads((FOLDER / f"{category}.json").read_text())
        slots = grammar_slots(category)
        assert len(own["templates"]) >= 25
        assert len(set(own["templates"])) == len(own["templates"])
        texts = own["templates"] + [value for values in slots.values() for value in values]
        for text in texts:
            for match in _SLOT.finditer(text):
                low, high, name = match.group(2, 3, 4)
                assert (int(low) < int(high)) if low else name.lower() in slots, text
        used = {m.group(4).lower() for text in texts for m in _SLOT.finditer(text) if m.group(4)}
        assert set(own["slots"]) <= used, "a slot that no template uses"
    for prompt in expand_prompts(1600):
        assert not _SLOT.search(prompt.messages[0]["content"])
        assert prompt.messages[0]["content"] == prompt.messages[0]["content"].strip()


def test_a_remembered_value_is_the_same_and_two_labels_differ() -> None:
    from paceline.data.grammar import _Expansion

    slots = {"x": ["one", "two", "eye"]}
    for number in range(20):
        filled = _Expansion(slots, str(number)).expand(
            "{x.a} {x.b} {x.a} {X.b} {a x.b} {1..3.n} {1..3.n}"
        )
        first, second, again, capital, article, noun, n, same = filled.split()
        assert first == again != second
        assert capital == second.capitalize()
        assert (article, noun) == ("an" if second[0] in "aeiou" else "a", second)
        assert n == same in "123"


def test_held_out_is_twelve_a_category_and_apart_from_train() -> None:
    held_out = read_prompts("held-out")
    assert held_out.sha256 == "3478ad7c2f3698fe9b2c255d638e7bd8e7d649dd56f1cabacb1443ad5003a7c6"
    assert held_out.rejected == ()
    assert Counter(prompt.category for prompt in held_out.prompts) == dict.fromkeys(CATEGORIES, 12)
    train = read_prompts("train").prompts
    assert contamination(train, held_out.prompts, ngram=8) == []
    texts = {prompt.messages[0]["content"] for prompt in train}
    assert not texts & {prompt.messages[0]["content"] for prompt in held_out.prompts}


def test_held_out_topics_are_unknown_to_the_grammar() -> None:
    grammar = " ".join(path.read_text().lower() for path in FOLDER.glob("*.json"))
    rows = [json.loads(line) for line in (FOLDER / "held-out.jsonl").read_text().splitlines()]
    assert [row["topic"] for row in rows if re.search(rf"\b{row['topic']}\b", grammar)] == []


def test_demo_eval_is_three_a_category_of_held_out() -> None:
    demo = read_prompts("demo-eval").prompts
    assert Counter(prompt.category for prompt in demo) == dict.fromkeys(CATEGORIES, 3)
    assert {p.prompt_id for p in demo} <= {p.prompt_id for p in read_prompts("held-out").prompts}


def test_wrong_names_and_numbers() -> None:
    for name in ("train:0", "train:x", "train:", "train:-3"):
        with pytest.raises(DataError, match="number of prompts"):
            read_prompts(name)
    with pytest.raises(DataError, match="at least 1"):
        expand_prompts(0)
