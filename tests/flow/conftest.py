"""Engines shared by all flow tests, and the lanes they run in (pytest -n 2).

Starting an engine takes seconds, so each starts once. Two engines on the same cores wait for each
other at every matrix, so a lane has a part of the cores for itself and all that it starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.draft import Draft, build_contract, build_eagle3_config, write_draft
from paceline.endpoint import Request, Sampling
from paceline.serve import VllmEndpoint, build_plan, start
from paceline.target import TargetFacts, read_target

_CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)

# The files that take longest, the longest first, so that the lanes end together.
_LONG = (
    "test_loop",
    "test_bad_input",
    "test_judge",
    "test_serve_front",
    "test_serve",
    "test_validate_run",
    "test_second_boot",
    "test_trained_equals_served",
    "test_block_drafts",
    "test_quantize",
    "test_contracts_of_vllm",
    "test_model_free",
)


def _take_cores() -> None:
    lane = os.environ.get("PYTEST_XDIST_WORKER")
    if lane is None:
        return
    num_lanes = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    if own := cores[int(lane.removeprefix("gw")) % num_lanes :: num_lanes]:
        os.sched_setaffinity(0, own)


_take_cores()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def smollm2() -> TargetFacts:
    return read_target("smollm2")


@pytest.fixture(scope="session")
def ask(smollm2: TargetFacts) -> Callable[..., Request]:
    """Builds a greedy request from one question, in SmolLM2's own chat form."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2.path / "tokenizer.json"))

    def build(question: str, *, max_tokens: int = 48, ignore_eos: bool = False) -> Request:
        ids = tokenizer.encode(_CHAT.format(question=question), add_special_tokens=False).ids
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos)
        return Request(request_id=question, prompt_ids=tuple(ids), sampling=sampling)

    return build


@pytest.fixture(scope="session")
def random_draft(smollm2: TargetFacts, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    """An untrained EAGLE-3 draft with a vocabulary of 4,096, in a folder with a misleading name."""
    import torch

    torch.manual_seed(0)
    config = build_eagle3_config(smollm2, aux_layer_ids=(2, 15, 27), draft_vocab_size=4096)
    tensors = {}
    for name, rule in build_contract("eagle3", config, smollm2).tensors.items():
        if name == "d2t":
            tensors[name] = torch.zeros(rule.shape, dtype=torch.int64)
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones(rule.shape, dtype=torch.bfloat16)
        elif rule.required:
            tensors[name] = (torch.randn(rule.shape) * 0.02).bfloat16()
    return write_draft(
        tmp_path_factory.mktemp("dflash-vs-medusa") / "random",
        family="eagle3",
        config=config,
        tensors=tensors,
        num_speculative_tokens=3,
        metadata={"name": "random"},
    )


@pytest.fixture(scope="session")
def engine_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-logs")


@pytest.fixture(scope="session")
def plain_endpoint(smollm2: TargetFacts, engine_logs: Path) -> Iterator[VllmEndpoint]:
    """The target alone."""
    with start(build_plan(smollm2, device="cpu"), log_path=engine_logs / "plain.log") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def draft_endpoint(
    smollm2: TargetFacts, random_draft: Draft, engine_logs: Path
) -> Iterator[VllmEndpoint]:
    """The target with the untrained draft."""
    plan = build_plan(smollm2, random_draft, device="cpu")
    with start(plan, log_path=engine_logs / "draft.log") as endpoint:
        yield endpoint
