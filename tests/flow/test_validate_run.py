"""`paceline validate --run` on real vLLM: a sound draft, one that ends the engine, one miswired."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from pathlib import Path

import pytest
from command_line import run_command

from paceline.draft import read_draft, resolve_draft
from paceline.endpoint import Request, Sampling
from paceline.errors import EngineError
from paceline.serve import RunCase, SmokeTest, Told, check_observed, observe_draft
from paceline.target import TargetFacts

pytestmark = pytest.mark.engine

NAME = "smollm2-eagle3"
PROMPT = (1, 4093, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411)
TEST = SmokeTest(
    requests=tuple(
        Request(
            request_id=str(number),
            prompt_ids=(*PROMPT, 500 + number),
            sampling=Sampling(max_tokens=16, ignore_eos=True),
        )
        for number in range(4)
    ),
    long_request=None,
    context_tokens=16384,
    time_s=240.0,
)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A word in the environment of everything that a test starts."""
    word = f"mark-{time.time_ns()}"
    monkeypatch.setenv("PACELINE_TEST_MARK", word)
    return word


def processes_with(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def copy_draft(folder: Path) -> Path:
    shutil.copytree(resolve_draft(NAME), folder)
    return folder


def rewrite(folder: Path, **changes: object) -> None:
    """Replaces tensors of the folder; "__" stands for a dot, None removes one."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for word, value in changes.items():
        name = word.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def by_rule(found: list[Told]) -> dict[str, list[Told]]:
    rules: dict[str, list[Told]] = {}
    for item in found:
        rules.setdefault(item.problem.rule, []).append(item)
    return rules


def test_bundled_draft_passes(mark: str) -> None:
    done = run_command(
        "validate", NAME, "--target", "smollm2", "--run", "--run-tokens", 700, "--json",
        timeout_s=280,
    )  # fmt: skip
    done.require(0)
    found = {item["rule"]: item for item in json.loads(done.out)["findings"]}
    run = {name: item for name, item in found.items() if name.startswith("run.")}
    # nothing of run.repeat and run.fidelity: three engines, the same text and tokens a step
    assert {item["severity"] for item in run.values()} == {"note"}, run
    assert set(run) == {"run.sandbox", "run.mem", "run.coverage"}
    # by hand: 5,089,536 weights of 2 bytes; 16,384 tokens of 3 heads of 64, keys and values
    weights, cache = 10_179_072, 16_384 * 3 * 64 * 2 * 2
    assert run["run.mem"]["found"] == f"{weights + cache + 16:,} bytes"  # and four scales
    assert "700 tokens" in run["run.coverage"]["message"]
    assert not any(
        item["where"] == "--run" for item in found.values() if item["rule"] == "not.checked"
    )
    assert not processes_with(mark)


def test_a_draft_that_ends_the_engine(smollm2: TargetFacts, tmp_path: Path, mark: str) -> None:
    """Changed after it was read: a tensor that vLLM has no place for. One finding, no trace."""
    import torch

    draft = read_draft(copy_draft(tmp_path / "draft"))
    rewrite(draft.path, midlayer__adapter__weight=torch.ones(4, 4, dtype=torch.bfloat16))
    log_path = tmp_path / "engine.log"
    seen = observe_draft(smollm2, draft, TEST, log_path=log_path)
    assert isinstance(seen.error, EngineError)
    found = by_rule(
        check_observed(
            RunCase(
                draft=draft,
                seen=seen,
                context_tokens=16384,
                num_long_tokens=None,
                estimate_bytes=None,
            )
        )
    )
    assert set(found) == {"run.sandbox", "run.boot"}
    message = found["run.boot"][0].problem.message
    assert "while starting" in message
    assert "adapter" in message
    assert "Traceback" not in message + found["run.boot"][0].problem.fix
    assert not processes_with(mark)
    assert log_path.stat().st_size


def test_a_draft_without_fc_and_with_nan(smollm2: TargetFacts, tmp_path: Path, mark: str) -> None:
    """vLLM 0.31.0 starts it and answers; three rules tell."""
    import torch

    folder = copy_draft(tmp_path / "draft")
    draft = read_draft(folder)
    rewrite(
        folder, fc__weight=None, norm__weight=torch.full((576,), float("nan"), dtype=torch.bfloat16)
    )
    tensors = {name: item for name, item in draft.tensors.items() if name != "fc.weight"}
    draft = dataclasses.replace(draft, tensors=tensors)
    seen = observe_draft(smollm2, draft, TEST, log_path=tmp_path / "engine.log")
    assert seen.error is None, seen.error
    case = RunCase(
        draft=draft, seen=seen, context_tokens=16384, num_long_tokens=None, estimate_bytes=10**6
    )
    found = by_rule(check_observed(case))
    assert "'fc.weight' of which no file holds a value" in found["run.loaded"][0].problem.message
    assert found["run.finite"][0].severity is None
    assert found["run.mem"][0].severity is None, "22 MB against an estimate of 1 MB"
    assert "run.zero" in found
    assert "run.coverage" not in found, "it drafts, only never well"
    assert not processes_with(mark)


def test_too_little_memory_and_too_little_time(
    smollm2: TargetFacts, tmp_path: Path, mark: str
) -> None:
    draft = read_draft(resolve_draft(NAME))
    for change, word in (({"memory_bytes": 300 * 2**20}, "memory"), ({"time_s": 1.0}, "time")):
        test = dataclasses.replace(TEST, **change)  # type: ignore[arg-type]
        seen = observe_draft(smollm2, draft, test, log_path=tmp_path / f"{word}.log")
        assert (seen.ended_for, seen.doing) == (word, "starting")
        assert not processes_with(mark)
