"""A design on paper: what is filled in, what is refused and why."""

from __future__ import annotations

import pytest

from paceline.errors import PlanError, RecipeError, TargetError
from paceline.forecast import build_forecast, list_shapes, parse_design, read_shape
from paceline.rules import read_rules

SHAPE = read_shape("qwen3.8-27b")


def _parse(family: str, k: int = 3, **values: object) -> object:
    lines = [f'family = "{family}"', f"num_speculative_tokens = {k}"]
    for key, value in values.items():
        text = f'"{value}"' if isinstance(value, str) else str(value).lower()
        lines.append(f"{key} = {text}")
    return parse_design("\n".join(lines), SHAPE)


def test_left_out_sizes_come_from_the_target() -> None:
    design = parse_design('family = "eagle3"\nnum_speculative_tokens = 5\n', SHAPE)
    # 24 heads do not divide 5,120, and vLLM's Llama layer then stops
    assert (design.hidden_size, design.num_heads, design.num_kv_heads) == (5120, 20, 4)
    assert (design.own_head, design.own_embedding, design.num_taps) == (False, False, 3)
    assert design.stated == ("num_speculative_tokens",)
    small = parse_design(
        'family = "eagle3"\nnum_speculative_tokens = 5\ndraft_vocab_size = 32000\n', SHAPE
    )
    assert small.own_head
    assert small.has_draft_vocabulary


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('family = "eagle3"\nnum_speculative_tokens = 3\nnum_layer = 2\n', "num_layer' is unknown"),
        ("num_speculative_tokens = 3\n", "'family' is missing"),
        ('family = "eagle9"\nnum_speculative_tokens = 3\n', "family is eagle9"),
        ('family = "mtp"\n', "num_speculative_tokens' is missing"),
        ('family = "mtp"\nnum_speculative_tokens = 0\n', "is 0"),
        ('family = "mtp"\nnum_speculative_tokens = true\n', "is true"),
        ('family = "eagle3"\nnum_speculative_tokens = 3\nweights = "int3"\n', "int3"),
        ("family = \n", "not valid TOML"),
    ],
)
def test_senseless_files_are_refused(text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        parse_design(text, SHAPE)


@pytest.mark.parametrize(
    ("family", "values", "says"),
    [
        ("mtp", {"weights": "fp8"}, "cannot be expressed"),
        ("mtp", {"draft_vocab_size": 32000}, "cannot be expressed"),
        ("medusa", {"weights": "fp8"}, "no such setting"),
        ("medusa", {"draft_vocab_size": 32000}, "no medusa draft with a cut"),
        ("draft_model", {"draft_vocab_size": 32000}, "target's vocabulary"),
        ("ngram", {"num_layers": 1}, "no sizes"),
        ("eagle3", {"num_heads": 5, "num_kv_heads": 2}, "not a multiple"),
        ("eagle3", {"draft_vocab_size": 300000}, "300,000"),
        ("eagle3", {"draft_vocab_size": 32000, "own_head": False}, "own_head is false"),
        ("eagle3", {"hidden_size": 2048, "own_embedding": False}, "own_embedding is false"),
        ("eagle3", {"num_taps": 65}, "num_taps is 65"),
        ("eagle3", {"group_size": 128}, "no effect"),
        ("eagle3", {"weights": "w4a16"}, "group_size is missing"),
    ],
)
def test_impossible_designs_say_why(family: str, values: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        _parse(family, **values)


def test_mtp_needs_a_target_with_a_head_and_a_k_it_can_reach() -> None:
    import dataclasses

    facts = dataclasses.replace(SHAPE.facts, num_mtp_layers=2)
    two = dataclasses.replace(SHAPE, facts=facts)
    text = 'family = "mtp"\nnum_speculative_tokens = {}\n'
    assert parse_design(text.format(4), two).num_layers == 2
    with pytest.raises(PlanError, match="predicts 2 tokens"):
        parse_design(text.format(3), two)
    none = dataclasses.replace(SHAPE, facts=dataclasses.replace(facts, num_mtp_layers=0))
    with pytest.raises(PlanError, match="has no MTP layer"):
        parse_design(text.format(1), none)


def test_a_group_must_divide_every_matrix() -> None:
    design = parse_design(
        'family = "eagle3"\nnum_speculative_tokens = 3\nweights = "w4a16"\ngroup_size = 96\n', SHAPE
    )
    with pytest.raises(PlanError, match="group_size 96 does not divide the"):
        build_forecast(design, SHAPE, read_rules("emc2-2027"))


def test_shapes_have_names_and_unknown_ones_a_message() -> None:
    assert list_shapes() == ("qwen3.5-4b", "qwen3.8-27b")
    with pytest.raises(TargetError, match=r"qwen3.5-4b, qwen3.8-27b"):
        read_shape("qwen9")


@pytest.mark.parametrize("family", ["eagle3", "draft_model"])
def test_heads_that_do_not_divide_the_width_are_refused(family: str) -> None:
    text = f'family = "{family}"\nnum_speculative_tokens = 3\nnum_heads = 24\n'
    with pytest.raises(PlanError, match="24 does not divide hidden_size 5120"):
        parse_design(text, SHAPE)
    text = 'family = "dflash"\nnum_speculative_tokens = 3\nnum_heads = 24\n'
    assert parse_design(text, SHAPE).num_heads == 24  # Qwen3's layer takes them
