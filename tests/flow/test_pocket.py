"""Pocket on real vLLM: its own MTP head, a head in a folder, a stitched target, what K costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.acceptance import build_acceptance
from paceline.data import build_requests, read_prompts
from paceline.draft import (
    Draft,
    read_draft,
    read_native_draft,
    resolve_draft,
    stitch_target,
    write_draft,
)
from paceline.endpoint import Answer, Request, Sampling
from paceline.forecast import CachePlan, measure_memory, parse_design, read_shape
from paceline.serve import VllmEndpoint, build_plan, start
from paceline.target import TargetFacts, read_target
from paceline.train import replay_draft
from paceline.train.families.mtp_weights import read_native_head

pytestmark = pytest.mark.engine

NATIVE_LENGTH_FLOOR = 2.3  # at K = 3; measured figures in docs/results/pocket.md
EAGLE3_LENGTH_FLOOR = 2.3


@pytest.fixture(scope="module")
def pocket() -> TargetFacts:
    return read_target("pocket")


@pytest.fixture(scope="module")
def requests(pocket: TargetFacts) -> list[Request]:
    sampling = Sampling(max_tokens=64)
    prompts = read_prompts("held-out").prompts[::6]
    return build_requests(prompts, pocket, sampling, thinking="off")


@pytest.fixture(scope="module")
def serve(pocket: TargetFacts, engine_logs: Path) -> Callable[..., VllmEndpoint]:
    def begin(draft: Draft | None, k: int = 0, target: TargetFacts = pocket) -> VllmEndpoint:
        plan = build_plan(target, draft, device="cpu", num_speculative_tokens=k or None)
        return start(plan, log_path=engine_logs / f"pocket-{k}.log")

    return begin


@pytest.fixture(scope="module")
def native(
    pocket: TargetFacts, requests: list[Request], serve: Callable[..., VllmEndpoint]
) -> Iterator[tuple[list[Answer], VllmEndpoint]]:
    with serve(read_native_draft(pocket), 3) as endpoint:
        yield list(endpoint.generate(requests, concurrency=1)), endpoint


def _length(answers: list[Answer]) -> float:
    took = [n for answer in answers for n in answer.per_step_accepted or ()]
    found = build_acceptance(took, [3] * len(took), num_speculative_tokens=3).acceptance_length
    assert found is not None
    return found


def test_native_head_drafts(native: tuple[list[Answer], VllmEndpoint], pocket: TargetFacts) -> None:
    answers, endpoint = native
    assert endpoint.facts.draft_architecture == "Qwen3_5MTP"
    assert all(set(a.per_step_drafted or (3,)) == {3} for a in answers)
    assert _length(answers) >= NATIVE_LENGTH_FLOOR
    memory = endpoint.memory()
    assert memory is not None
    head = read_native_draft(pocket)
    assert 0 <= memory.weights_bytes + memory.buffers_bytes - head.files_bytes < 4096


def test_the_bundled_eagle3_accepts_as_much_with_half_the_memory(
    native: tuple[list[Answer], VllmEndpoint],
    pocket: TargetFacts,
    requests: list[Request],
    serve: Callable[..., VllmEndpoint],
) -> None:
    draft = read_draft(resolve_draft("pocket-eagle3"))
    with serve(draft, 3) as endpoint:
        answers = list(endpoint.generate(requests, concurrency=1))
        own, heads = endpoint.memory(), native[1].memory()
    assert own is not None
    assert heads is not None
    assert heads.total_bytes / own.total_bytes >= 2
    assert _length(answers) >= EAGLE3_LENGTH_FLOOR
    assert _length(answers) >= 0.85 * _length(native[0])
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in answers]
    replay = replay_draft(draft, pocket, texts, device="cpu", dtype="bfloat16")
    assert replay.num_agree >= 0.97 * replay.num_steps
    assert all(gap <= 0.5 for gap in replay.gaps)


def test_head_in_a_folder_and_in_a_stitched_target_draft_alike(
    native: tuple[list[Answer], VllmEndpoint],
    pocket: TargetFacts,
    requests: list[Request],
    serve: Callable[..., VllmEndpoint],
    tmp_path: Path,
) -> None:
    """The same weights by three ways: in the target, in a folder of its own, stitched in."""
    head = read_native_draft(pocket)
    tensors = read_native_head(pocket)
    folder = write_draft(
        tmp_path / "head",
        family="mtp",
        config=head.config,
        tensors=tensors,
        num_speculative_tokens=3,
        metadata={"name": "copy"},
    )
    stitched = read_target(stitch_target(pocket.path, tensors, tmp_path / "stitched"))
    few = requests[:4]
    wanted = [(a.output_ids, a.per_step_accepted) for a in native[0][:4]]
    for draft, target in ((folder, pocket), (read_native_draft(stitched), stitched)):
        with serve(draft, 3, target) as endpoint:
            found = endpoint.generate(few, concurrency=1)
        assert [(a.output_ids, a.per_step_accepted) for a in found] == wanted


def test_pool_without_the_draft_is_a_plain_engines(
    native: tuple[list[Answer], VllmEndpoint], serve: Callable[..., VllmEndpoint]
) -> None:
    with serve(None) as plain:
        wanted, same = plain.pool()
    assert wanted == same
    with_draft, without = native[1].pool()
    assert without == wanted
    memory = native[1].memory()
    assert memory is not None
    assert memory.kv_bytes == with_draft["kv_bytes"] - wanted["kv_bytes"]
    assert memory.state_bytes == with_draft["state_bytes"] - wanted["state_bytes"]


def test_forecast_is_what_the_engine_holds(
    pocket: TargetFacts, serve: Callable[..., VllmEndpoint]
) -> None:
    """Recurrent states grow with K and the pages with them, so another K than above."""
    k = 5
    shape = read_shape("pocket")
    design = parse_design(f'family = "mtp"\nnum_speculative_tokens = {k}\n', shape)
    said = measure_memory(design, shape, context_tokens=16384, plan=CachePlan(device="cpu"))
    with serve(read_native_draft(pocket, num_speculative_tokens=k), k) as endpoint:
        held = endpoint.memory()
    assert held is not None
    assert said.total_bytes == held.total_bytes


def test_native_head_trained_equals_served(
    native: tuple[list[Answer], VllmEndpoint], pocket: TargetFacts
) -> None:
    """bfloat16 in both: what differs lies within four steps of the logits' own rounding."""
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in native[0]]
    head = read_native_draft(pocket)
    replay = replay_draft(head, pocket, texts, num_speculative_tokens=3, device="cpu")
    assert replay.num_steps > 200
    assert all(gap <= 0.5 for gap in replay.gaps)
    assert replay.num_agree >= 0.98 * replay.num_steps
    assert replay.position_1_served is not None
    assert replay.position_1_trained is not None
    assert abs(replay.position_1_served - replay.position_1_trained) <= 0.01
