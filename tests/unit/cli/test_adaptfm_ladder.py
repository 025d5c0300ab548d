"""The ladder: one change a rung, plans that a GPU takes, figures by hand, a folder that goes on."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.draft import read_draft, resolve_draft
from paceline.errors import PlanError, ResultError
from paceline.records import build_provenance, read_json, write_json
from paceline.serve import ShapeDraft
from paceline.serve.shape_run import plan_shape
from paceline.target import TargetFacts, read_target

FOLDER = Path(__file__).parents[3] / "recipes" / "adaptfm"


def load(name: str) -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def rungs() -> Any:
    return load("rungs")


@pytest.fixture(scope="module")
def ladder() -> Any:
    return load("ladder")


@pytest.fixture(scope="module")
def page() -> Any:
    return load("ladder_page")


def options(work: Path, **changed: Any) -> argparse.Namespace:
    given = {"work": work, "requests": 2, "tiny": True, "at_once": None, "quantised": None}
    given |= {"answers": 8, "data": None, "first": None}
    return argparse.Namespace(**{**given, **changed})


def open_part(ladder: Any, work: Path, regimes: tuple[str, ...] = ("64:16", "192:16")) -> Any:
    read = ladder.read_regimes(list(regimes))
    return ladder.Part("qwen3.5-4b", read, options(work), "cpu")


def keep(part: Any, name: str, latencies: tuple[float, ...]) -> None:
    """What a finished rung leaves: in both regimes the same latencies, one a request."""
    middle = {"median": sum(latencies) / len(latencies), "low": None, "high": None}
    record = {
        "latency_ms": middle,
        "ttft_ms": middle,
        "tpot_ms": {"median": None, "low": None, "high": None},
        "tau": 2.5,
        "energy_j_per_token": None,
        "requests": [{"latency_ms": value, "ttft_ms": 1.0} for value in latencies],
    }
    regimes = [{**record, "prompt_tokens": n, "new_tokens": 16} for n in (64, 192)]
    rung = next(one for one in part.rungs if one.name == name)
    part._keep(
        rung, {"regimes": regimes, "engine": {}, "kernels": {}, "host": None, "texts": {"a": [1]}}
    )


def test_a_rung_changes_one_thing_of_a_rung_before_it(rungs: Any) -> None:
    for stack in (rungs.SMOLLM2, rungs.SHAPE):
        seen: dict[str, Any] = {}
        for rung in stack:
            if rung.over is None:
                assert rung.name == "eager"
                assert not rung.engine["compiled"]
                assert (rung.draft, rung.quantised) == ("none", False)
            else:
                below = seen[rung.over]
                names = [field.name for field in dataclasses.fields(rung)]
                ignored = ("name", "over", "change")
                new = {
                    n for n in names if n not in ignored and getattr(rung, n) != getattr(below, n)
                }
                one = [set(), {"k"}, {"quantised"}, {"engine"}, {"env"}, {"cudagraph_blocks"}]
                assert new in [*one, {"draft", "k"}, {"draft", "k", "acceptance_length"}], rung.name
                assert bool(new) == (rung.name != "eager-again")
            seen[rung.name] = rung


def test_every_rung_is_a_plan_that_a_gpu_takes(
    rungs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pocket has not smollm2's draft: the head it has stands in its place."""
    taken: list[Any] = []
    monkeypatch.setattr(rungs, "check_plan", taken.append)
    target = read_target("pocket")
    for rung in rungs.SMOLLM2:
        if rung.draft == "smollm2-eagle3":
            rung = dataclasses.replace(rung, draft="native")
        rungs.prepare_target(rung, target, target.path, length=400, device="cuda")
    assert len(taken) == len(rungs.SMOLLM2)
    plans = dict(zip([rung.name for rung in rungs.SMOLLM2], taken, strict=True))
    assert plans["eager"].engine_args["enforce_eager"] is True
    assert plans["compiled"].engine_args["enforce_eager"] is False
    assert plans["eagle3-graphs"].engine_args["cudagraph_capture_sizes"] == [4, 8]
    assert plans["eagle3-in-step"].engine_args["async_scheduling"] is False
    assert plans["eagle3"].engine_args["async_scheduling"] is True
    assert plans["eagle3-one-process"].env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert plans["suffix-k16"].num_speculative_tokens == 16


def test_the_bundled_draft_of_the_rungs_has_the_k_that_is_named(rungs: Any) -> None:
    draft = read_draft(resolve_draft("smollm2-eagle3"))
    assert {rung.k for rung in rungs.SMOLLM2 if rung.name == "eagle3"} == {
        draft.num_speculative_tokens
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("compiled", "no CUDA graphs"),
        ("in-step", "a CPU, where vLLM schedules in step"),
        ("w4a16", "no quantised target"),
        ("eagle3-one-process", "no effect"),
    ],
)
def test_what_a_cpu_has_not_is_a_reason(rungs: Any, name: str, said: str) -> None:
    rung = next(one for one in rungs.SMOLLM2 if one.name == name)
    if rung.draft == "smollm2-eagle3":
        rung = dataclasses.replace(rung, draft="native")
    with pytest.raises(PlanError, match=said):
        rungs.prepare_target(rung, read_target("pocket"), None, length=400, device="cpu")


def test_a_quantised_shape_names_every_matrix_once(rungs: Any, ladder: Any, tmp_path: Path) -> None:
    facts = ladder.read_shape_target("qwen3.5-4b", False)
    made = rungs.quantise_shape(facts)
    settings = made.config["quantization_config"]
    assert made.config["tie_word_embeddings"] is False
    assert "quantization_config" not in facts.config
    assert len([name for name in settings["ignore"] if "in_proj_" in name]) == 2 * 24
    assert "re:^mtp.*" in settings["ignore"]
    bits = {
        target: group["weights"]["num_bits"]
        for group in settings["config_groups"].values()
        for target in group["targets"]
    }
    assert bits["re:.*mlp\\.down_proj$"] == 4
    assert bits["re:.*self_attn\\.q_proj$"] == 4
    assert bits["re:.*linear_attn\\.in_proj_qkv$"] == 8
    assert sorted(bits.values()).count(4) == 7  # four of attention, three of the MLP
    assert rungs.quantise_shape(facts).config == made.config
    plan = plan_shape(
        tmp_path,
        made,
        ShapeDraft(family="mtp", num_speculative_tokens=3),
        acceptance_length=2.8,
        device="cuda",
        max_model_len=8452,
        kv_cache_bytes=2**30,
    )
    written = read_json(plan.target.path / "config.json")
    assert written["quantization_config"] == settings
    assert plan.engine_args["load_format"] == "dummy"
    assert plan.engine_args["speculative_config"]["synthetic_acceptance_length"] == 2.8


def test_the_best_takes_what_surely_gained_and_fits(rungs: Any) -> None:
    gains = {"eagle3": 1.4, "eagle3-k5": 1.1, "w4a16": 1.05, "eagle3-graphs": 1.02, "suffix": 1.2}
    best = rungs.build_best(rungs.SMOLLM2, gains, "eagle3")
    assert (best.draft, best.k, best.quantised, best.cudagraph_blocks) == (
        "smollm2-eagle3",
        5,
        True,
        2,
    )
    assert best.over == "eagle3"
    # of two values of K the greater gain; what the fastest has already is nothing new
    both = rungs.build_best(rungs.SMOLLM2, {"eagle3-k5": 1.1, "eagle3-k7": 1.2}, "w4a16-eagle3")
    assert (both.k, both.quantised) == (7, True)
    assert rungs.build_best(rungs.SMOLLM2, {"eagle3": 1.4, "w4a16": 1.1}, "w4a16-eagle3") is None
    # a gain of another draft, or of K on it, says nothing about suffix
    assert (
        rungs.build_best(rungs.SMOLLM2, {"eagle3-k5": 1.1, "eagle3-graphs": 1.1}, "suffix") is None
    )


def test_figures_by_hand(ladder: Any, page: Any, tmp_path: Path) -> None:
    part = open_part(ladder, tmp_path)
    keep(part, "eager", (100.0, 300.0))
    keep(part, "mtp", (50.0, 50.0))
    built = {row["name"]: row for row in part.build()["rungs"]}
    assert built["mtp"]["speedup"]["mean"] == pytest.approx(4.0)  # 200 / 50 in both regimes
    assert built["mtp"]["over"] == "eager"  # compiled was not measured
    assert built["mtp"]["gave"]["mean"] == pytest.approx(4.0)
    assert built["compiled"]["reason"] == "not run yet"
    keep(part, "compiled", (80.0, 80.0))
    built = {row["name"]: row for row in part.build()["rungs"]}
    assert built["mtp"]["gave"]["mean"] == pytest.approx(1.6)
    assert built["mtp"]["speedup"]["regimes"] == pytest.approx([4.0, 4.0])
    heads, *rows = page.build_rows(part.build())
    assert heads[:5] == ["rung", "on", "change", "64:16", "192:16"]
    assert [row[0] for row in rows] == ["eager", "compiled", "mtp"]
    assert rows[2][3].startswith("4.00")


def test_a_baseline_that_was_disturbed_is_seen(ladder: Any, page: Any, tmp_path: Path) -> None:
    part = open_part(ladder, tmp_path)
    part.rungs = list(load("rungs").SMOLLM2)
    keep(part, "eager", (400.0, 400.0))
    keep(part, "eager-again", (100.0, 100.0))
    assert "The baseline itself, at the end again: 4.00" in page._about(part.build())[0]


def test_a_finished_rung_stays_and_one_with_a_reason_runs_again(
    ladder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = open_part(ladder, tmp_path)
    keep(part, "eager", (100.0, 300.0))
    part._keep(part.rungs[2], {"reason": "the engine died"})
    again = open_part(ladder, tmp_path)
    asked: list[list[str]] = []
    monkeypatch.setattr(again, "_measure", lambda todo, _: asked.append([r.name for r in todo]))
    again.measure(lambda: True)
    assert asked == [["compiled", "mtp", "w4a16-mtp", "w4a16"]]
    rows = {row["name"]: row for row in again.build()["rungs"]}
    assert rows["mtp"]["reason"] == "the engine died"
    again.rungs[0] = dataclasses.replace(again.rungs[0], engine={"compiled": True})
    assert again._read(again.rungs[0]) is None  # another rung of the same name


def test_after_the_time_nothing_starts_and_nothing_is_written(ladder: Any, tmp_path: Path) -> None:
    part = open_part(ladder, tmp_path)
    part.measure(lambda: False)
    assert [path.name for path in part.folder.iterdir()] == ["run.json"]
    assert {row["reason"] for row in part.build()["rungs"]} == {"not run yet"}


def test_another_run_in_the_folder_is_refused(ladder: Any, tmp_path: Path) -> None:
    open_part(ladder, tmp_path)
    open_part(ladder, tmp_path)
    with pytest.raises(PlanError, match="another run lies here"):
        open_part(ladder, tmp_path, ("64:16", "193:16"))


def test_the_page_gets_its_section_between_the_marks(
    ladder: Any, page: Any, tmp_path: Path
) -> None:
    part = open_part(ladder, tmp_path)
    keep(part, "eager", (100.0, 300.0))
    record = {
        "provenance": build_provenance(seed=0),
        "machine": "cpu of a test",
        "num_requests": 2,
        "parts": {"qwen3.5-4b": part.build()},
    }
    write_json(tmp_path / "ladder-test.json", record)
    target = tmp_path / "page.md"
    target.write_text(f"before\n{page.BEGIN}\nformer\n{page.END}\nafter\n")
    for _ in range(2):  # written again it is the same
        page.write_section(tmp_path / "ladder-test.json", target)
        text = target.read_text()
        assert text.startswith(f"before\n{page.BEGIN}\n")
        assert text.endswith(f"{page.END}\nafter\n")
        assert "former" not in text
    assert "* `compiled`: not run yet" in text
    assert "a trial of the command, no result" in text
    target.write_text("no mark")
    with pytest.raises(ResultError, match="no place"):
        page.write_section(tmp_path / "ladder-test.json", target)
    own = FOLDER.parents[1] / "docs" / "results" / "adaptfm.md"
    assert own.read_text().count(page.BEGIN) == own.read_text().count(page.END) == 1


def test_the_shape_has_a_plan_with_a_decreed_acceptance(
    rungs: Any, ladder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[TargetFacts, Any, dict[str, Any]]] = []

    def note(target: TargetFacts, draft: Any, **settings: Any) -> None:
        opened.append((target, draft, settings))

    monkeypatch.setattr(rungs, "open_shape", note)
    facts = ladder.read_shape_target("qwen3.5-4b", False)
    for rung in rungs.SHAPE:
        rungs.prepare_shape(rung, facts, length=8448, device="cuda")(tmp_path / "log")
    decreed = [settings["acceptance_length"] for _, _, settings in opened]
    assert decreed == [None, None, 2.8, 2.8, None]
    assert [settings["enforce_eager"] for _, _, settings in opened] == [True] + [False] * 4
    assert ["quantization_config" in target.config for target, _, _ in opened] == [
        False,
        False,
        False,
        True,
        True,
    ]


class Quantiser:
    """A process that ends when it is waited for."""

    def __init__(self, events: list[str], code: int) -> None:
        self.events, self.code = events, code

    def wait(self) -> int:
        self.events.append("quantised")
        return self.code


@pytest.mark.parametrize("code", [0, 1])
def test_the_quantised_target_is_made_while_engines_start_and_before_one_is_timed(
    ladder: Any, rungs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    part = open_part(ladder, tmp_path)
    part.is_shape, part.at_once, part.options.first = False, 3, 9
    part.rungs = list(rungs.SMOLLM2)
    events: list[str] = []

    @contextlib.contextmanager
    def open_together(batch: Any, logs: Path) -> Any:
        events.append("start " + " ".join(rung.name for rung, _ in batch))
        yield iter([(rung, None) for rung, _ in batch])

    def prepare(rung: Any) -> str:
        if rung.quantised and part.quantised is None:
            raise PlanError("no quantised target")
        return rung.name

    def measure_one(endpoint: None) -> dict[str, str]:
        events.append("time")
        return {"reason": "not measured in a test"}

    def begin(*args: Any, **given: Any) -> Any:
        events.append("quantising")
        return tmp_path, Quantiser(events, code)

    monkeypatch.setattr(ladder, "open_together", open_together)
    monkeypatch.setattr(ladder, "begin_quantising", begin)
    monkeypatch.setattr(part, "_prepare", prepare)
    monkeypatch.setattr(part, "_measure_one", measure_one)
    part.measure(lambda: True)
    assert events[:4] == ["quantising", "start eager compiled eagle3", "quantised", "time"]
    starts = [event.removeprefix("start ").split() for event in events if event.startswith("start")]
    assert [name for names in starts for name in names] == [
        *("eager", "compiled", "eagle3", "suffix", "eagle3-k5", "eagle3-graphs"),
        *("eagle3-stream", "eagle3-k7", *(["w4a16-eagle3"] if code == 0 else []), "eager-again"),
    ]
    assert events.count("quantised") == 1
