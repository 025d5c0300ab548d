"""The bundled rules hold the published constants; the reader refuses everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import RulesError
from paceline.rules import describe_rules, list_rules, parse_rules, read_rules

EMC2 = read_rules("emc2-2027")


def test_bundled_rules() -> None:
    assert list_rules() == ("demo", "emc2-2027", "pocket")


def test_published_constants() -> None:
    assert EMC2.weights == {"tau": 0.5, "memory": 0.25, "tpot": 0.25}
    assert EMC2.baseline_score == 100.0
    assert EMC2.context_tokens == 16384
    assert EMC2.families == ("mtp", "eagle3", "draft_model", "medusa")
    assert EMC2.limits.max_parameters == 1_500_000_000
    assert EMC2.limits.max_files_bytes == 3_000_000_000
    assert (EMC2.engine.name, EMC2.engine.version) == ("vllm", "0.31.0")
    assert (EMC2.target.name, EMC2.target.dtype) == ("Qwen3.8-27B", "bfloat16")
    assert EMC2.speculation.baseline_family == "mtp"
    assert EMC2.terms.tpot_statistic == "ratio_of_medians"
    assert EMC2.caps["tau"] is None  # "the memory and speed terms are capped"


def test_every_unpublished_value_is_provisional() -> None:
    published = {
        "baseline_score",
        "terms.tau.weight",
        "terms.tau.cap",
        "terms.memory.weight",
        "terms.tpot.weight",
        "terms.tpot_statistic",
        "limits.families",
        "limits.max_parameters",
        "limits.max_files_bytes",
        "limits.context_tokens",
        "limits.forbids_copied_layers",
        "target.name",
        "target.dtype",
        "engine.name",
        "engine.version",
        "speculation.baseline_family",
        "prompts.name",
        "contest.organiser",
        "contest.dates",
        "contest.how_to_submit",
        "contest.not_allowed",
        "contest.num_final_entries_per_team",
    }
    names = {label for label, _ in describe_rules(EMC2)} - {"rules"}
    assert names - set(EMC2.provisional) == published
    assert set(EMC2.provisional) <= names


@pytest.mark.parametrize("name", ["demo", "pocket"])
def test_rules_of_this_project_are_the_contest_in_miniature(name: str) -> None:
    demo = read_rules(name)
    assert demo.weights == EMC2.weights
    assert demo.context_tokens == EMC2.context_tokens
    assert demo.sampling.temperature == 0
    assert demo.speculation.entry_num_speculative_tokens == 3
    assert demo.speculation.baseline_num_speculative_tokens == 3
    assert demo.provisional == ()


def test_pocket_is_measured_against_its_own_head() -> None:
    pocket = read_rules("pocket")
    assert pocket.target.name == "pocket"
    assert pocket.speculation.baseline_family == EMC2.speculation.baseline_family == "mtp"


def test_describe_marks_provisional() -> None:
    lines = dict(describe_rules(EMC2))
    assert lines["gate.minimum_tau_ratio"] == "0.8 (provisional)"
    assert lines["limits.max_parameters"] == "1,500,000,000"
    assert lines["terms.tau.cap"] == "none"


def test_text_and_sha_travel_with_the_rules() -> None:
    assert parse_rules(EMC2.text) == EMC2
    assert len(EMC2.sha256) == 64


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("weight = 0.50", "weigth = 0.50", "key 'terms.tau.weigth' is unknown"),
        ("[gate]", "[gates]", "key 'gates' is unknown"),
        ('cap = "none"\n', "", "key 'terms.tau.cap' is missing"),
        ("baseline_score = 100.0", "", "key 'baseline_score' is missing"),
        ("weight = 0.50", "weight = true", "key 'terms.tau.weight' is True"),
        ("weight = 0.50", "weight = nan", "key 'terms.tau.weight' is nan"),
        ("weight = 0.50", "weight = 0.60", "weights that add up to 1"),
        ("context_tokens = 16384", "context_tokens = 16384.0", "a whole number"),
        ("context_tokens = 16384", "context_tokens = 0", "at least 1"),
        ('families = ["mtp"', "families = [1", "a list of texts"),
        ('name = "vllm"', "name = 3", "a text"),
        ("cap = { value = 2.0, provisional = true }", "cap = 0.9", 'at least 1, or "none"'),
        ("{ value = 0.8, provisional = true }", "{ value = 0.8, provisional = false }", "provis"),
        ("{ value = 0.8, provisional = true }", "{ value = 0.8 }", "provisional = true"),
        ("{ value = 0.8, provisional = true }", "1.5", "between 0 and 1"),
        ('"ratio_of_medians"', '"mean"', "one of ratio_of_medians, paired_geomean"),
        ("[1024, 4096, 8192, 16384]", "[8192, 1024]", "ascending"),
        (
            "top_p = { value = 1.0, provisional = true }",
            "top_p = { value = 0.0, provisional = true }",
            "more than 0",
        ),
        ("{ value = 64, provisional = true }", "1", "at least 1"),
        ("num_final_entries_per_team = 1", "num_final_entries_per_team = 2", "expected 1"),
        (
            "order_effect = { value = 0.02, provisional = true }",
            "order_effect = 0",
            "between 0 and 1",
        ),
        ('"February 2027: emc2', '"February 2027 emc2', '"when: what"'),
        ("[contest]\norganiser", "[contest]\norganizer", "key 'contest.organizer' is unknown"),
        ('version = "2026-11-2"', "version = ", "not valid TOML"),
    ],
)
def test_strict_reader_names_file_and_key(old: str, new: str, part: str, tmp_path: Path) -> None:
    assert old in EMC2.text
    path = tmp_path / "mine.toml"
    path.write_text(EMC2.text.replace(old, new, 1))
    with pytest.raises(RulesError) as caught:
        read_rules(path)
    assert part in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_a_published_value_is_not_provisional() -> None:
    text = EMC2.text.replace(
        "minimum_tau_ratio = { value = 0.8, provisional = true }", "minimum_tau_ratio = 0.7"
    )
    rules = parse_rules(text)
    assert rules.gate.minimum_tau_ratio == 0.7
    assert "gate.minimum_tau_ratio" not in rules.provisional


def test_unknown_name_lists_what_exists() -> None:
    with pytest.raises(RulesError, match="emc2-2027"):
        read_rules("emc2-2028")


def test_rules_without_a_contest_are_read() -> None:
    text = EMC2.text[: EMC2.text.index("[contest]")]
    rules = parse_rules(text)
    assert rules.contest is None
    assert "contest.max_entries_per_team" not in rules.provisional
    assert EMC2.contest is not None
    assert EMC2.contest.max_entries_per_team == 5


def test_keys_that_came_later_may_be_left_out() -> None:
    late = (
        *("max_extra_nll_nats", "max_length_change", "max_eos_change", "max_distinct_2_drop"),
        *("max_other_cpu_share", "max_clock_difference", "max_block_reruns"),
    )
    lines = [line for line in EMC2.text.splitlines() if not line.startswith(late)]
    older = parse_rules("\n".join(lines) + "\n")
    assert (older.fidelity, older.protocol) == (EMC2.fidelity, EMC2.protocol)
    assert len(EMC2.provisional) - len(older.provisional) == len(late)
