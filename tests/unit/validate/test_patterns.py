"""The small grammar of module patterns, against `re` where both can answer."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from bad_folders import build_packed
from builders import build_draft, build_target_facts
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.patterns import matches_name, parse_pattern
from paceline.validate import validate_draft

ATOMS = st.sampled_from(
    ["a", "b", "_", "-", "7", ".", ".*", ".+", r"\.", r"\d", r"\d+", "[0-9]", "[0-9]*"]
)


@settings(max_examples=400, deadline=None)
@given(
    atoms=st.lists(ATOMS, min_size=1, max_size=6),
    starts=st.booleans(),
    ends=st.booleans(),
    name=st.text(alphabet="ab_-.70", max_size=12),
)
def test_a_small_pattern_matches_as_re_does(
    atoms: list[str], starts: bool, ends: bool, name: str
) -> None:
    text = ("^" if starts else "") + "".join(atoms) + ("$" if ends else "")
    steps = parse_pattern(text, is_regex=True)
    if steps is None:
        assert sum(atom[-1] in "*+" for atom in atoms) > 4
    else:
        assert matches_name(steps, name) == (re.match(text, name) is not None)


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$",
        "(a|a)*b",
        "a*",
        "a**",
        "[a-z]*",
        "a{1,99}",
        r"\w+",
        "",
        "^",
        "é",
        "a\n",
        "x" * 129,
        r"(?=a)",
        r"\1",
        ".*.*.*.*.*x",
        "*",
        "+a",
        "a|b",
        r"a\$b",
    ],
)
def test_what_could_hang_or_is_not_needed_is_outside_the_grammar(text: str) -> None:
    assert parse_pattern(text, is_regex=True) is None


@pytest.mark.parametrize(
    "text", ["lm_head", "model.layers.0.mlp", "Linear", r"re:.*self_attn\.o_proj$", "re:^visual.*"]
)
def test_patterns_of_the_field_are_inside(text: str) -> None:
    assert parse_pattern(text.removeprefix("re:"), is_regex=text.startswith("re:")) is not None


@pytest.mark.parametrize("name", ["a(b", "a b", "", "../x", "x" * 129])
def test_a_name_is_a_plain_name(name: str) -> None:
    assert parse_pattern(name, is_regex=False) is None


def test_the_dearest_pattern_ends_at_once() -> None:
    steps = parse_pattern(".*.*.*.*" + "a" * 119 + "$", is_regex=True)
    assert steps is not None
    began = time.process_time()
    assert not matches_name(steps, "a" * 256 + "b")
    assert time.process_time() - began < 1.0


def fused_rules(folder: Path) -> set[str]:
    report = validate_draft(folder, target=build_target_facts(folder.parent))
    return {item.rule for item in report.findings if item.rule.startswith("q.")}


@pytest.mark.parametrize(
    ("settings_", "rules"),
    [
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head"]}, {"q.method"}),
        ({"ignore": ["re:.*"] * 257}, {"q.method", "q.regex"}),
        ({"dynamic": {"-:.*(mtp)+": {}}}, {"q.method", "q.regex"}),
        ({"dynamic": {"-:.*mtp.*": {}, "+:.*mlp.*": {}}}, {"q.method"}),
        ({"config_groups": {"0": {"targets": ["re:(x*)*"]}}}, {"q.method", "q.regex"}),
        ({"modules_to_not_convert": ["a b"]}, {"q.method", "q.regex"}),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"q.method", "q.online"}),
        ({"kv_cache_scheme": None}, {"q.method"}),
        ({"kv_cache_quant_algo": "FP8"}, {"q.method", "q.nokv"}),
    ],
)
def test_quantization_settings(
    settings_: dict[str, object], rules: set[str], tmp_path: Path
) -> None:
    folder = build_draft(tmp_path / "d", config={"quantization_config": settings_})
    assert fused_rules(folder) == rules


def test_a_hostile_list_of_patterns_costs_no_time(tmp_path: Path) -> None:
    hostile = {"ignore": ["re:" + "(a+)+" * 8 + "$"] * 1500, "targets": ["re:" + ".*" * 30] * 1500}
    folder = build_draft(tmp_path / "d", config={"quantization_config": hostile})
    began = time.process_time()
    assert "q.regex" in fused_rules(folder)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("group_size", "plain", "rules"),
    [
        (8, "", {"q.method"}),  # divides 16 and 32
        (16, "", {"q.method"}),
        (32, "", {"q.method", "q.group"}),  # not the 16 inputs of o, gate and up
        (10, "", {"q.method", "q.group"}),
        (-1, "", {"q.method"}),  # whole rows
        (8, "up_proj", {"q.method", "q.fused"}),
        (8, "down_proj", {"q.method"}),  # fused with nothing
    ],
)
def test_packed_tensors(group_size: int, plain: str, rules: set[str], tmp_path: Path) -> None:
    folder = build_packed(tmp_path / "d", group_size=group_size, plain=plain)
    assert fused_rules(folder) == rules
