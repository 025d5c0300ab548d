"""The challenge's gates as published, and files that are wrong."""

from __future__ import annotations

from importlib import resources

import pytest

from paceline.errors import RulesError
from paceline.rules import GATE_NAMES, list_rules, parse_challenge, read_challenge

TEXT = (resources.files("paceline.rules") / "adaptfm-2026.toml").read_text(encoding="utf-8")


def test_published_values() -> None:
    found = read_challenge("adaptfm-2026")
    assert found.target.name == "Qwen3.5-4B"
    assert [found.gate(name).minimum for name in GATE_NAMES] == [0.621, 0.814, 0.630]
    assert not any(dotted.endswith(".minimum") for dotted in found.provisional)
    assert "gates.ifeval.metric" in found.provisional
    assert "answers.max_tokens" in found.provisional
    assert "adaptfm-2026" not in list_rules()  # no contest of drafts: no score, no weights


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("minimum = 0.621", "minimum = 1.621", "between 0 and 1"),
        ("minimum = 0.621", "", "'gates.mmlu_pro.minimum' is missing"),
        ("minimum = 0.621", "minimum = 0.621\nspare = 1", "'gates.mmlu_pro.spare' is unknown"),
        ("value = 4096", "value = 0", "at least 1"),
        ("value = 0.95", "value = 1.0", "between 0.5 and 1"),
        ("[answers]", "[answers", "not valid TOML"),
        ("gates.", "gate.", "no quality gates"),
    ],
)
def test_wrong_files(before: str, after: str, expected: str) -> None:
    with pytest.raises(RulesError, match=expected):
        parse_challenge(TEXT.replace(before, after))


def test_unknown_names() -> None:
    with pytest.raises(RulesError, match="no such challenge"):
        read_challenge("nowhere")
    with pytest.raises(RulesError, match="no quality gates"):
        read_challenge("emc2-2027")
    with pytest.raises(RulesError, match="no gate 'gsm8k'"):
        read_challenge("adaptfm-2026").gate("gsm8k")
