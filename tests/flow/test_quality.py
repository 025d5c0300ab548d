"""Quality gates on a real engine: bundled questions, one plain target, scored by the harness."""

from __future__ import annotations

import pytest

from paceline.data import open_tokenizer
from paceline.eval import BUNDLED_QUESTIONS, ask_task, build_quality, converse_endpoint
from paceline.rules import GATE_NAMES, read_challenge
from paceline.serve import VllmEndpoint
from paceline.target import TargetFacts

pytestmark = pytest.mark.engine
pytest.importorskip("lm_eval", reason="needs the extra quality")


def test_each_format_on_a_served_target(plain_endpoint: VllmEndpoint, smollm2: TargetFacts) -> None:
    challenge = read_challenge("adaptfm-2026")
    converse = converse_endpoint(plain_endpoint, open_tokenizer(smollm2), concurrency=4)
    asked = {
        name: ask_task(
            converse,
            name,
            challenge.gate(name),
            questions=BUNDLED_QUESTIONS,
            max_tokens=24,
            limit=2,
        )
        for name in GATE_NAMES
    }
    assert {name: len(rows) for name, rows in asked.items()} == {
        "mmlu_pro": 4,  # two of each subject
        "ifeval": 2,
        "gpqa_diamond": 2,
    }
    rows = [row for of_task in asked.values() for row in of_task]
    assert all(1 <= (row.num_tokens or 0) <= 24 for row in rows)
    assert any(row.outcome == "cut" for row in rows)
    record = build_quality(challenge, asked, asked, applies_minimum=False)
    assert record["verdict"] == "undecided"  # eight questions decide nothing
    for task in record["tasks"].values():
        assert task["loss"]["only_plain"] == task["loss"]["only_arm"] == 0
