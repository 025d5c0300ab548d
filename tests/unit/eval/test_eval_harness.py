"""The real lm-evaluation-harness on the bundled questions, asked of scripted answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.eval import BUNDLED_QUESTIONS, Reply, ask_task
from paceline.rules import read_challenge

pytest.importorskip("lm_eval", reason="needs the extra quality")

CHALLENGE = read_challenge("adaptfm-2026")
Question = Sequence[dict[str, str]]


def answer(write: Callable[[str], Reply]) -> Callable[[Sequence[Question], int], list[Reply]]:
    return lambda questions, max_tokens: [write(q[-1]["content"]) for q in questions]


def reply(text: str, *, is_cut: bool = False) -> Reply:
    return Reply(text=text, is_cut=is_cut, num_tokens=5, has_thought=False)


def run(name: str, write: Callable[[str], Reply], **more: Path) -> dict[str, str]:
    rows = ask_task(
        answer(write),
        name,
        CHALLENGE.gate(name),
        questions=more.get("questions", BUNDLED_QUESTIONS),
        max_tokens=50,
    )
    return {row.question_id: row.outcome for row in rows}


def test_multiple_choice_with_extraction() -> None:
    """MMLU-Pro's own prompt, five examples, stop text and extraction."""
    lines = (BUNDLED_QUESTIONS / "mmlu_pro/test.jsonl").read_text().splitlines()
    keys = {row["question"]: row["answer"] for row in map(json.loads, lines)}
    examples: set[int] = set()

    def write(prompt: str) -> Reply:
        examples.add(prompt.count("The answer is ("))
        question = prompt.rsplit("Question:\n", 1)[1].split("\n")[0]
        right = f"The answer is ({keys[question]})."
        if "7 times 8" in question:
            return reply(f"It is 56, choice {keys[question]}.")  # right, not in the format
        if "100 minus 37" in question:
            return reply(right, is_cut=True)
        if "green pigment" in question:
            return reply(f"{right} Question: The answer is (J)", is_cut=True)
        if "prime" in question:
            return reply("The answer is (J).")
        return reply(right if "chambers" in question else "")

    found = run("mmlu_pro", write)
    assert examples == {5}
    assert len(found) == 16
    assert found["mmlu_pro_math/0"] == "broken"
    assert found["mmlu_pro_math/1"] == "cut"
    assert found["mmlu_pro_math/5"] == "wrong"
    assert found["mmlu_pro_biology/4"] == "right"
    # came to the task's own stop text, so it is finished, and what follows does not count
    assert found["mmlu_pro_biology/3"] == "right"
    assert found["mmlu_pro_biology/0"] == "broken"  # nothing after its thought


def test_instructions_are_checked() -> None:
    def write(prompt: str) -> Reply:
        if "walk in a park" in prompt:
            return reply("I walk in the park and see trees")
        if "Name a fruit" in prompt:
            return reply("Apple")
        return reply("", is_cut="Name a city" in prompt)

    found = run("ifeval", write)
    assert len(found) == 12
    assert [found[f"ifeval/{number}"] for number in (0, 2, 3, 4)] == [
        "right",
        "wrong",
        "cut",
        "broken",
    ]


def test_four_choices_in_the_same_order_each_time() -> None:
    """The harness shuffles the choices: a pair must see one order, or it is no pair."""

    def write(prompt: str) -> Reply:
        choices = prompt.split("Choices:\n")[1].split("\n")
        for right in ("100 °C", "Electron"):
            line = next((line for line in choices if line.endswith(f") {right}")), None)
            if line is not None:
                return reply(f"So the answer is {line[:3]}")
        return reply("I do not know" if "gold" in prompt else "The answer is (E)")

    first = run("gpqa_diamond", write)
    assert first == run("gpqa_diamond", write)
    outcomes = [first[f"gpqa_diamond_cot_zeroshot/{number}"] for number in range(4)]
    assert outcomes == ["right", "right", "broken", "wrong"]


def test_wrong_questions_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "questions"
    with pytest.raises(DataError, match=r"ifeval/train\.jsonl: there are no questions"):
        run("ifeval", lambda prompt: reply(""), questions=folder)
    shutil.copytree(BUNDLED_QUESTIONS, folder)
    path = folder / "ifeval/train.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row["instruction_id_list"] = ["length_constraints:number_sentences"]
    path.write_text(json.dumps(row) + "\n")
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        with pytest.raises(DataError, match="needs NLTK's punkt_tab"):
            run("ifeval", lambda prompt: reply(""), questions=folder)
    del row["kwargs"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"train\.jsonl:1: column 'kwargs' is missing"):
        run("ifeval", lambda prompt: reply(""), questions=folder)
