"""Model-free drafting on real vLLM: K tokens on every step, and a hybrid's text stays its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from text_forks import count_forks, delivered_tau, reported_length
from toy_hybrid import make_prompts, make_toy_hybrid

from paceline.draft import read_draft
from paceline.endpoint import Answer, Request, Sampling
from paceline.errors import EngineError
from paceline.serve import VllmEndpoint, build_plan, start
from paceline.target import TargetFacts, read_target

pytestmark = pytest.mark.engine

K = 5
TOLERANCE = 0.15  # nats: a near tie of the target
ASKED = [
    Request(
        request_id=str(number),
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=64, ignore_eos=True),
    )
    for number, prompt in enumerate(make_prompts(48))
]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return read_target(make_toy_hybrid(tmp_path_factory.mktemp("hybrid") / "toy"))


@pytest.fixture(scope="module")
def plain(hybrid: TargetFacts, engine_logs: Path) -> Iterator[tuple[VllmEndpoint, list[Answer]]]:
    plan = build_plan(hybrid, device="cpu", max_model_len=512)
    with start(plan, log_path=engine_logs / "hybrid-plain.log") as endpoint:
        yield endpoint, endpoint.generate(ASKED, concurrency=8)


def ask_with(hybrid: TargetFacts, spec: dict[str, Any], folder: Path) -> list[Answer]:
    """The 48 prompts, four in flight, with a model-free draft of this spec.json."""
    (folder / "spec.json").write_text(json.dumps({"num_speculative_tokens": K, **spec}))
    plan = build_plan(hybrid, read_draft(folder), device="cpu", max_model_len=512)
    with start(plan, log_path=folder.with_suffix(".log")) as endpoint:
        facts = endpoint.facts
        assert (facts.method, facts.num_speculative_tokens) == (spec["family"], K)
        assert (facts.proposer is None) == ("proposer" in spec)
        return endpoint.generate(ASKED, concurrency=4)


@pytest.mark.parametrize(
    "spec", [{"family": "ngram"}, {"family": "suffix", "cache_tokens": 4096}], ids=str
)
def test_constant_k_leaves_a_hybrids_text_alone(
    hybrid: TargetFacts,
    plain: tuple[VllmEndpoint, list[Answer]],
    spec: dict[str, Any],
    tmp_path: Path,
) -> None:
    endpoint, texts = plain
    answers = ask_with(hybrid, spec, tmp_path)
    assert {step for answer in answers for step in answer.per_step_drafted or ()} == {K}
    forks = count_forks(texts, answers, endpoint, tolerance=TOLERANCE)
    assert forks.real_fork == 0, forks
    tau, reported = delivered_tau(answers), reported_length(answers)
    assert tau > 2
    assert reported is not None
    assert abs(reported - tau) / tau < 0.05  # only the cut last steps differ


def test_vllms_own_ngram_still_corrupts_a_hybrid(
    hybrid: TargetFacts,
    plain: tuple[VllmEndpoint, list[Answer]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM #39273 in 0.31.0. Should this fail one day, it is fixed: let the plan allow it."""
    monkeypatch.setattr("paceline.serve.endpoint.check_plan", lambda plan: [])
    endpoint, texts = plain
    stock = {"family": "ngram", "proposer": "vllm", "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    try:
        answers = ask_with(hybrid, stock, tmp_path)
    except EngineError:
        return  # on a CPU without AMX the first empty draft ends the engine
    forks = count_forks(texts, answers, endpoint, tolerance=TOLERANCE)
    assert forks.real_fork > 0
    tau, reported = delivered_tau(answers), reported_length(answers)
    assert reported is not None
    assert reported > 1.1 * tau  # and it looks better than it is


def test_suffix_on_a_dense_target(
    smollm2: TargetFacts,
    plain_endpoint: VllmEndpoint,
    ask: Callable[..., Request],
    engine_logs: Path,
) -> None:
    requests = [
        ask(question)
        for question in (
            "Name three colours.",
            "Repeat: one two three, one two three, one two three.",
            "Count from 1 to 9, twice.",
        )
    ]
    texts = plain_endpoint.generate(requests, concurrency=3)
    plan = build_plan(smollm2, method="suffix", num_speculative_tokens=4, device="cpu")
    with start(plan, log_path=engine_logs / "suffix.log") as endpoint:
        assert endpoint.facts.method == "suffix"
        assert endpoint.facts.proposer == "paceline.serve.proposers.classes.SuffixProposer"
        answers = endpoint.generate(requests, concurrency=2)
        counters = endpoint.counters()
        assert endpoint.memory() is None
    drafted = [step for answer in answers for step in answer.per_step_drafted or ()]
    assert set(drafted) == {4}
    assert counters.num_drafts == len(drafted)
    assert counters.num_draft_tokens == 4 * len(drafted)  # filled places count as drafted
    assert count_forks(texts, answers, plain_endpoint, tolerance=TOLERANCE).real_fork == 0
    assert delivered_tau(answers) > 1.1
