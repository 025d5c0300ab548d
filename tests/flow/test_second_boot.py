"""`run.repeat` and `run.fidelity` on real vLLM: artefacts that make each of them fire.

A draft model beside a hybrid target: vLLM 0.31.0's first runner gives it the block table of the
target's recurrent states, and the target's own text breaks. The plan refuses that, so the target's
facts are made to say nothing of its recurrence. And a head whose file is exchanged between the two
boots, as a mounted folder can be. Four boots; what one of them shows serves both.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.data import build_requests, read_prompts
from paceline.draft import (
    Draft,
    build_contract,
    build_draft_model_config,
    read_draft,
    read_native_draft,
    write_draft,
)
from paceline.endpoint import Sampling
from paceline.errors import PlanError
from paceline.eval import find_text_faults
from paceline.rules import read_rules
from paceline.serve import (
    Beside,
    Observed,
    RunCase,
    SmokeTest,
    check_repeat,
    observe_beside,
    observe_draft,
)
from paceline.target import TargetFacts, read_target
from paceline.train.families.mtp_weights import read_native_head

pytestmark = pytest.mark.engine


def write_head(folder: Path, target: TargetFacts) -> Draft:
    """The target's own head, as a folder."""
    return write_draft(
        folder,
        family="mtp",
        config=read_native_draft(target).config,
        tensors=read_native_head(target),
        num_speculative_tokens=3,
        metadata={"name": "head"},
    )


def write_whole(folder: Path, target: TargetFacts) -> Draft:
    """An untrained draft model of one layer."""
    import torch

    torch.manual_seed(0)
    config = build_draft_model_config(target, num_layers=1)
    rules = build_contract("draft_model", config, target).tensors
    tensors = {
        name: torch.ones(rule.shape, dtype=torch.bfloat16)
        if name.endswith("norm.weight")
        else (torch.randn(rule.shape) * 0.02).bfloat16()
        for name, rule in rules.items()
        if rule.required
    }
    return write_draft(
        folder,
        family="draft_model",
        config=config,
        tensors=tensors,
        num_speculative_tokens=3,
        metadata={"name": "whole"},
    )


def spoil(folder: Path) -> None:
    """Exchanges the file for one that drafts nothing: the same names, other values."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["mtp.fc.weight"] = torch.zeros_like(tensors["mtp.fc.weight"])
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def boots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Draft, Observed, Observed, Beside]:
    """(head, its first boot, the draft model's boot, what was seen beside)."""
    place, pocket = tmp_path_factory.mktemp("boots"), read_target("pocket")
    prompts = read_prompts("demo-eval").prompts[:4]
    sampling = Sampling(max_tokens=16, ignore_eos=True)
    test = SmokeTest(
        requests=tuple(build_requests(prompts, pocket, sampling, thinking="off")),
        long_request=None,
        context_tokens=16384,
        time_s=240.0,
    )
    head, whole = write_head(place / "head", pocket), write_whole(place / "whole", pocket)
    with pytest.raises(PlanError, match="overwrites the target's states"):
        raise observe_draft(pocket, whole, test, log_path=place / "log").error or AssertionError
    blind = dataclasses.replace(pocket, layer_types=())
    broken = observe_draft(blind, whole, test, log_path=place / "log")
    assert broken.error is None, broken.error
    sound = observe_draft(pocket, head, test, log_path=place / "log")
    assert sound.error is None, sound.error
    spoil(head.path)
    # the target alone is asked where the broken answers part from its own
    seen = dataclasses.replace(sound, answers=broken.answers)
    return head, sound, broken, observe_beside(pocket, head, test, seen, log_path=place / "log")


def test_a_draft_that_breaks_the_targets_state(
    boots: tuple[Draft, Observed, Observed, Beside],
) -> None:
    _, sound, broken, beside = boots
    assert beside.plain is not None
    emc2 = read_rules("emc2-2027")
    faults, num_forks = find_text_faults(beside.plain, broken.answers, beside.choices, emc2)
    assert faults
    assert num_forks >= 2, "one alone only warns"
    # a sound head on the same target, prompts and machine parts from it at near ties alone
    assert _count_same(sound, beside) > _count_same(broken, beside)


def _count_same(seen: Observed, beside: Beside) -> int:
    pairs = zip(seen.answers, beside.plain or (), strict=True)
    return sum(mine.output_ids == theirs.output_ids for mine, theirs in pairs)


def test_a_file_that_is_exchanged_between_two_boots(
    boots: tuple[Draft, Observed, Observed, Beside],
) -> None:
    head, sound, _, beside = boots
    case = RunCase(
        draft=head, seen=sound, context_tokens=16384, num_long_tokens=None, estimate_bytes=None
    )
    (told,) = check_repeat(case, beside)
    assert told.problem.rule == "run.repeat"
    assert told.severity is None
    assert "two boots delivered" in told.problem.message
    assert read_draft(head.path).sha256 != head.sha256
