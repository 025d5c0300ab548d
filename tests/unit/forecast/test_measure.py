"""Pairs, intervals, resuming and failures of --measure, on scripted engines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.endpoint import Answer, EngineFacts
from paceline.errors import EngineError, PlanError, RecipeError
from paceline.forecast import (
    Configuration,
    build_draft_config,
    build_measure_plan,
    list_own_tensors,
    measure_steps,
    native_baseline,
    parse_design,
    read_measure_plan,
    read_runs,
    read_shape,
)
from paceline.forecast.measure import build_point
from paceline.forecast.measured_record import describe_measured
from paceline.serve import ShapeDraft
from paceline.serve.shape_run import write_shape_draft

SHAPE = read_shape("qwen3.5-4b")
RECIPES = Path(__file__).parents[3] / "recipes" / "forecast"


def _answer(step_s: float, *, chunks: tuple[int, ...] = (1, 2, 3, 2), start: float = 5.0) -> Answer:
    times = tuple(start + step_s * number for number in range(len(chunks)))
    return Answer(
        request_id="a",
        prompt_ids=(1,),
        output_ids=(0,) * sum(chunks),
        finish_reason="length",
        sent_at_s=0.0,
        chunk_times_s=times,
        chunk_tokens=chunks,
    )


class _Engine:
    """Steps of `step_s` seconds; writes down who was asked."""

    facts = EngineFacts(
        vllm_version="0.31.0",
        platform="cpu",
        device_name="x",
        method="none",
        num_speculative_tokens=0,
        runner="v1",
        target_architecture="x",
        draft_architecture=None,
        rejection_sample_method=None,
        draft_sample_method=None,
        dtype="bfloat16",
        max_model_len=1,
        prefix_caching=False,
        enforce_eager=True,
        start_s=1.5,
    )

    def __init__(self, name: str, step_s: float, asked: list[str]) -> None:
        self.name, self.step_s, self.asked = name, step_s, asked

    def generate(self, requests: Any, **_: Any) -> list[Answer]:
        self.asked.append(self.name)
        return [_answer(self.step_s) for _ in requests]

    def memory(self, *, context_tokens: int) -> None:
        return None


class _Room:
    """Opens scripted engines; `broken` fail to start. together: that many start at one time."""

    def __init__(self, *broken: str, together: int = 1) -> None:
        self.opened: list[str] = []
        self.asked: list[str] = []
        self.broken = broken
        self.alive = self.most = 0
        self.together = threading.Barrier(together)

    @contextlib.contextmanager
    def open(self, one: Configuration) -> Iterator[Any]:
        self.opened.append(one.name)
        if one.name != "baseline":
            self.together.wait(timeout=10)
        if one.name in self.broken:
            raise EngineError("the engine died")
        self.alive += 1
        self.most = max(self.most, self.alive)
        yield _Engine(one.name, 0.010 if one.name == "baseline" else 0.015, self.asked)
        self.alive -= 1


def _plan(*names: str, num_repeats: int = 4):
    design = parse_design('family = "eagle3"\nnum_speculative_tokens = 3\n', SHAPE)
    designs = [
        (name, parse_design(f'family = "eagle3"\nnum_speculative_tokens = {k}\n', SHAPE))
        for k, name in enumerate(names, 1)
    ]
    assert design
    return build_measure_plan(
        designs, native_baseline(SHAPE, 3), lengths=[8], num_repeats=num_repeats, max_tokens=8
    )


def _measure(room: _Room, path: Path, plan: Any, **settings: Any):
    return measure_steps(
        plan, SHAPE, room.open, path=path, machine="cpu x", engine="vllm 0.31.0", **settings
    )


def test_a_point_by_hand() -> None:
    """Steps of 10, 12, 14 ms against 5, 4, 7: ratios 2, 3, 2. 7 tokens come in 3 steps."""
    own = [_answer(step) for step in (0.010, 0.012, 0.014)]
    point = build_point(own, [_answer(s) for s in (0.005, 0.004, 0.007)], context_tokens=9)
    assert point.step_ms == pytest.approx(12)
    assert point.reference_ms == pytest.approx(5)
    assert point.ratio == pytest.approx(2)  # of the pairs, not 12 / 5
    assert (point.ratio_low, point.ratio_high) == pytest.approx((2, 3))
    assert (point.step_ms_low, point.step_ms_high) == pytest.approx((10, 14))
    assert point.acceptance_length == pytest.approx(7 / 3)
    assert point.tpot_ms == pytest.approx(12 * 3 / 7)
    assert point.repeats_ms == pytest.approx((10, 12, 14))


def test_pairs_are_asked_in_turn_and_the_first_changes(tmp_path: Path) -> None:
    room = _Room()
    found = _measure(room, tmp_path / "steps.jsonl", _plan("a"))
    assert room.opened == ["baseline", "plain", "a"]
    assert room.most == 2
    alone, plain = room.asked[:5], room.asked[5:15]
    assert alone == ["baseline"] * 5  # a warm-up and four repeats
    b, p = "baseline", "plain"
    assert plain == [p, b, p, b, b, p, p, b, b, p]
    assert [run.arm for run in found.runs] == ["baseline", "plain", "design"]
    assert [run.reference for run in found.runs] == [None] + [found.runs[0].key] * 2
    assert found.runs[2].points[0].ratio == pytest.approx(1.5)
    assert found.runs[0].points[0].ratio is None


@pytest.mark.parametrize(
    ("steps", "asked"),
    [
        ([0.015] * 4, 4),
        ([0.015, 0.020, 0.030, 0.025, 0.019, 0.0151], 6),  # 15.1 is within 1 % of 15
        ([0.015 * 1.02**n for n in range(20)], 12),  # never: three times the planned four
    ],
)
def test_a_disturbed_engine_is_asked_again(tmp_path: Path, steps: list[float], asked: int) -> None:
    class Disturbed(_Engine):
        def generate(self, requests: Any, **_: Any) -> list[Answer]:
            self.asked.append(self.name)
            return [_answer(next(times)) for _ in requests]

    times = iter([0.1, *steps])  # the first answer is the warm-up

    @contextlib.contextmanager
    def open_endpoint(one: Configuration) -> Iterator[Any]:
        own = Disturbed if one.name == "plain" else _Engine
        yield own(one.name, 0.010, room.asked)

    room = _Room()
    plan, path = _plan(), tmp_path / "steps.jsonl"
    found = measure_steps(plan, SHAPE, open_endpoint, path=path, machine="m", engine="vllm 0.31.0")
    assert room.asked.count("plain") == 1 + asked
    point = found.runs[1].points[0]
    assert (point.num_repeats, len(point.repeats_ms)) == (asked, asked)
    assert point.reference_ms == pytest.approx(10)


def test_a_rerun_measures_only_what_is_missing(tmp_path: Path) -> None:
    path, plan = tmp_path / "steps.jsonl", _plan("a", "b")
    first = _Room("a")
    found = _measure(first, path, plan)
    assert list(found.failed) == ["a"]
    assert [run.name for run in found.runs] == ["baseline", "plain", "b"]
    second = _Room()
    found = _measure(second, path, plan)
    assert second.opened == ["baseline", "a"]
    assert found.num_cached == 3
    assert [run.name for run in found.runs] == ["baseline", "plain", "a", "b"]
    third = _Room()
    assert _measure(third, path, plan).num_cached == 4
    assert third.opened == []
    assert len(read_runs(path)) == 4
    # another number of repeats, another machine: other figures
    _measure(third, path, _plan("a", "b", num_repeats=2))
    assert third.opened == ["baseline", "plain", "a", "b"]


def test_engines_start_together_and_are_measured_in_turn(tmp_path: Path) -> None:
    room = _Room("b", together=2)
    found = _measure(room, tmp_path / "steps.jsonl", _plan("a", "b", "c"), at_once=2)
    assert (room.most, room.alive) == (3, 0)  # the reference and two more; all are closed
    assert list(found.failed) == ["b"]
    assert [run.name for run in found.runs] == ["baseline", "plain", "a", "c"]
    asked = room.asked[5:]  # pairs with the reference, never with a neighbour
    assert set(asked[:10]) == {"baseline", "plain"}
    assert set(asked[10:20]) == {"baseline", "a"}
    assert set(asked[20:]) == {"baseline", "c"}


def test_a_slice_of_time_starts_nothing_that_would_end_later(tmp_path: Path) -> None:
    room = _Room()
    found = _measure(room, tmp_path / "steps.jsonl", _plan("a", "b"), minutes=0.0)
    assert room.opened == ["baseline"]
    assert found.left == ("plain", "a", "b")
    text = str(describe_measured(found, SHAPE))
    assert "not reached" in text


def test_a_reference_that_does_not_start_ends_it(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="died"):
        _measure(_Room("baseline"), tmp_path / "steps.jsonl", _plan("a"))


@pytest.mark.parametrize("target", ["qwen3.8-27b", "qwen3.5-4b"])
def test_the_recipes_cover_four_families_and_every_k(target: str) -> None:
    plan = read_measure_plan(RECIPES / f"{target}.toml", read_shape(target))
    ks = {
        one.design.num_speculative_tokens
        for one in (plan.reference, *plan.configurations)
        if one.design is not None and one.design.family == "mtp"
    }
    assert ks == set(range(1, 8))
    rest = [one.design for one in plan.configurations if one.design is not None]
    assert {design.family for design in rest} == {"mtp", "eagle3", "medusa", "draft_model"}
    assert sum(design.family != "mtp" for design in rest) >= 12
    assert all(one.minutes for one in (plan.reference, *plan.configurations))


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ('target = "qwen3.5-4b"', 'target = "qwen3.8-27b"', PlanError, "the plan is for"),
        ("num_repeats = 6", "num_repeats = 1", PlanError, "at least 2 repeats"),
        ("num_repeats = 6", "repeats = 6", RecipeError, "'repeats' is unknown"),
        ('name = "plain"', 'name = "mtp-k3"', RecipeError, "two configurations"),
        ("acceptance_length = 1.7", "acceptance_length = 2.7", RecipeError, "expected 1 to 2"),
    ],
)
def test_a_wrong_plan_gets_a_message(
    tmp_path: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    text = (RECIPES / "qwen3.5-4b.toml").read_text()
    assert old in text
    (tmp_path / "p.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(error, match=message):
        read_measure_plan(tmp_path / "p.toml", SHAPE)


_SMALL = (
    "hidden_size = 64\nintermediate_size = 64\nnum_heads = 2\nnum_kv_heads = 1\nhead_dim = 32\n"
)


@pytest.mark.parametrize(
    "text",
    [
        'family = "eagle3"\nnum_layers = 2\ndraft_vocab_size = 64\n' + _SMALL,
        'family = "eagle3"\nweights = "fp8"\ndraft_vocab_size = 64\n' + _SMALL,
        'family = "eagle3"\nweights = "w4a16"\ngroup_size = 32\ndraft_vocab_size = 64\n' + _SMALL,
        'family = "dflash"\nnum_layers = 2\nwindow = 128\ndraft_vocab_size = 64\n' + _SMALL,
        'family = "draft_model"\nweights = "w8a16"\nown_head = false\n' + _SMALL,
    ],
)
def test_a_draft_by_shape_is_a_sound_folder_of_the_foreseen_size(text: str, tmp_path: Path) -> None:
    """`read_draft` takes it, and its weights are the bytes that the forecast counts."""
    from paceline.forecast.sizes import measure_design

    design = parse_design(text + "num_speculative_tokens = 3\n", SHAPE)
    sizes = measure_design(design, SHAPE, context_tokens=16384)
    draft = write_shape_draft(
        tmp_path,
        ShapeDraft(
            family=design.family,
            num_speculative_tokens=3,
            config=build_draft_config(design, SHAPE),
            own=list_own_tensors(design),
        ),
    )
    stored = sum(tensor.end - tensor.start for tensor in draft.tensors.values())
    # a second EAGLE-3 layer's hidden_norm may be left out of the file and is built all the same
    assert stored == pytest.approx(sizes.weights_bytes, abs=256)
