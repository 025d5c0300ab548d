"""Drafting on a hybrid target on a CUDA machine: whose text stays the target's own.

200 prompts, greedy, through unmodified vLLM 0.31.0: without a draft (twice), with vLLM's own
variable-length methods (the plan refuses them; they are started anyway), with a constant K, with
the target's own MTP head where it has one; then all of them with a shared beginning and prefix
caching, which the plan turns off. PACELINE_GPU_TARGET names a hybrid target; without it a toy is
trained first (10 s). PACELINE_GPU_OUT: a folder for the table.

make test-gpu, or `pytest -s -m gpu tests/gpu/test_hybrid_model_free.py` (minutes). Each engine is
a process of its own, one after the other beside the plain one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from text_forks import Forks, count_forks, delivered_tau, reported_length
from toy_hybrid import make_prompts, make_toy_hybrid

from paceline.draft import Draft, read_draft, read_native_draft
from paceline.endpoint import Answer, Request, Sampling
from paceline.errors import DraftError, EngineError
from paceline.serve import Plan, VllmEndpoint, build_plan, start
from paceline.serve.install import engine_python
from paceline.target import TargetFacts, read_target

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

K = 5
TOLERANCE = 0.15  # nats
CONCURRENCY = 64
KV_BYTES = 4 * 2**30
ARMS: dict[str, dict[str, Any]] = {
    "vLLM's ngram 2/5": {
        "family": "ngram",
        "proposer": "vllm",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    },
    "vLLM's suffix": {"family": "suffix", "proposer": "vllm"},
    "constant-K ngram 1/5": {"family": "ngram"},
    "constant-K suffix": {"family": "suffix"},
    "constant-K suffix, cache": {"family": "suffix", "cache_tokens": 65536},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One arm. drafted: the different numbers of drafted tokens a step; failure: it did not run."""

    name: str
    forks: Forks | None = None
    tau: float | None = None
    reported: float | None = None
    drafted: tuple[int, ...] = ()
    hits: int | None = None
    failure: str = ""

    def show(self) -> str:
        if self.forks is None:
            return f"{self.name:36} {self.failure}"
        gaps = [gap for gap in self.forks.gaps if gap is not None]
        cells = (
            f"{self.forks.identical:9} {self.forks.near_tie:8} {self.forks.real_fork:9}"
            f" {max(gaps, default=0.0):7.2f}"
        )
        reported = "      " if self.reported is None else f"{self.reported:6.3f}"
        tau = "      " if self.tau is None else f"{self.tau:6.3f}"
        return f"{self.name:36} {cells} {tau} {reported}  {self.drafted} {self.hits or ''}"


def build_requests(target: TargetFacts, count: int) -> list[Request]:
    """Chat prompts where the target has a tokenizer, the toy's own language elsewhere."""
    sampling = Sampling(max_tokens=96, ignore_eos=target.num_tokenizer_tokens is None)
    if target.num_tokenizer_tokens is None:
        prompts = make_prompts(count)
    else:
        from paceline.data import build_requests as build
        from paceline.data import read_prompts

        asked = read_prompts(f"train:{count}").prompts
        template = target.path / "chat_template.jinja"
        switch = template.is_file() and "enable_thinking" in template.read_text()
        built = build(asked, target, sampling, thinking="off" if switch else "none")
        prompts = [request.prompt_ids for request in built]
    return [
        Request(request_id=str(number), prompt_ids=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]


def share_a_beginning(requests: Sequence[Request], length: int) -> list[Request]:
    """Every prompt after one and the same preamble, longer than a cache block of a hybrid."""
    text = [token for request in requests for token in request.prompt_ids]
    preamble = tuple((text * (1 + length // len(text)))[:length])
    return [
        dataclasses.replace(request, prompt_ids=preamble + request.prompt_ids)
        for request in requests
    ]


def write_draft(spec: dict[str, Any], folder: Path) -> Draft:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps({"num_speculative_tokens": K, **spec}))
    return read_draft(folder)


def find_native(target: TargetFacts) -> Draft | None:
    try:
        return read_native_draft(target, num_speculative_tokens=3)
    except DraftError:
        return None


def plan_arm(
    target: TargetFacts, draft: Draft | None, device: str, length: int, *, caching: bool = False
) -> Plan:
    plan = build_plan(
        target,
        draft,
        device=device,
        max_model_len=length,
        max_num_seqs=CONCURRENCY,
        enforce_eager=True,
        kv_cache_bytes=KV_BYTES if device == "cuda" else None,
    )
    if not caching:
        return plan
    args = {**plan.engine_args, "enable_prefix_caching": True}  # the plan turns it off
    return dataclasses.replace(plan, engine_args=args)


def measure_arm(
    name: str,
    plan: Plan,
    requests: Sequence[Request],
    plain: Sequence[Answer],
    target: VllmEndpoint,
    log_path: Path,
) -> Row:
    try:
        with start(plan, log_path=log_path) as endpoint:
            answers = endpoint.generate(requests, concurrency=CONCURRENCY)
            hits = endpoint.counters().prefix_cache_hits
    except EngineError as problem:
        return Row(name=name, failure="failed: " + str(problem).splitlines()[0])
    return compare(name, plain, answers, target, hits)


def compare(
    name: str,
    plain: Sequence[Answer],
    answers: Sequence[Answer],
    target: VllmEndpoint,
    hits: int | None = None,
) -> Row:
    drafted = {step for answer in answers for step in answer.per_step_drafted or ()}
    return Row(
        name=name,
        forks=count_forks(plain, answers, target, tolerance=TOLERANCE),
        tau=delivered_tau(answers),
        reported=reported_length(answers),
        drafted=tuple(sorted(drafted)),
        hits=hits,
    )


def measure_all(target: TargetFacts, device: str, count: int, folder: Path) -> dict[str, Row]:
    """Every arm against the target alone, and one more with prefix caching on shared prompts."""
    requests = build_requests(target, count)
    shared_length = min(1700, target.max_position_embeddings // 2)
    shared = share_a_beginning(requests[: count // 2], shared_length)
    longest = max(len(request.prompt_ids) for request in shared) + 96 + K + 1
    length = min(target.max_position_embeddings, longest)
    rows: dict[str, Row] = {}
    native = find_native(target)
    with start(plan_arm(target, None, device, length), log_path=folder / "plain.log") as endpoint:

        def measure(name: str, draft: Draft | None, asked: Any, texts: Any, **extra: bool) -> None:
            plan = plan_arm(target, draft, device, length, **extra)
            log_path = folder / f"{name}.log"
            rows[name] = measure_arm(name, plan, asked, texts, endpoint, log_path)
            print(rows[name].show(), flush=True)

        plain = endpoint.generate(requests, concurrency=CONCURRENCY)
        again = endpoint.generate(requests[::-1], concurrency=CONCURRENCY)[::-1]
        rows["no draft, again"] = compare("no draft, again", plain, again, endpoint)
        for name, spec in ARMS.items():
            if name == "vLLM's suffix" and not has_arctic():
                rows[name] = Row(name=name, failure="not run: arctic-inference is not installed")
                continue
            measure(name, write_draft(spec, folder / name), requests, plain)
        if native is not None:
            measure("native MTP", native, requests, plain)
        if device == "cuda":  # vLLM's CPU build has no kernel for it
            texts = endpoint.generate(shared, concurrency=CONCURRENCY)
            suffix = write_draft(ARMS["constant-K suffix"], folder / "shared")
            cached = {"no draft": None, "constant-K suffix": suffix}
            cached |= {} if native is None else {"native MTP": native}
            for name, draft in cached.items():
                measure(f"{name}, prefix caching", draft, shared, texts, caching=True)
    return rows


def has_arctic() -> bool:
    probe = [engine_python(), "-c", "import arctic_inference.suffix_decoding"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def show(rows: dict[str, Row]) -> str:
    head = f"{'arm':36} identical near tie real fork max gap    tau vLLM's  drafted, prefix hits"
    return "\n".join([head, *(row.show() for row in rows.values())])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    folder = tmp_path_factory.mktemp("hybrid-model-free")
    named = os.environ.get("PACELINE_GPU_TARGET")
    target = read_target(named or make_toy_hybrid(folder / "toy"))
    assert target.is_hybrid
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.serve.endpoint.check_plan", lambda plan: [])
        found = measure_all(target, "cuda", 200, folder)
    print("\n" + show(found))
    if "PACELINE_GPU_OUT" in os.environ:
        Path(os.environ["PACELINE_GPU_OUT"], "hybrid.txt").write_text(show(found) + "\n")
    return found


def test_constant_k_forks_at_near_ties_only(rows: dict[str, Row]) -> None:
    for name, row in rows.items():
        if name.startswith("constant-K") and "prefix" not in name:
            assert row.forks is not None, row.failure
            assert row.forks.real_fork == 0, row.show()
            assert row.drafted == (K,)


def test_reported_length_is_the_delivered_one(rows: dict[str, Row]) -> None:
    for name, row in rows.items():
        if name.startswith("constant-K") and "prefix" not in name:
            assert row.tau is not None
            assert row.reported is not None
            assert abs(row.reported - row.tau) / row.tau < 0.1


def test_prefix_caching_leaves_at_near_ties_only(rows: dict[str, Row]) -> None:
    """On one H200 it did, 100 texts with a shared beginning each; the plan turns it off still."""
    for name, row in rows.items():
        if "prefix caching" in name:
            assert row.forks is not None, row.failure
            assert row.hits
            assert row.forks.real_fork == 0, row.show()


@pytest.mark.skipif(os.environ.get("PACELINE_GPU_TARGET") != "pocket", reason="figures of pocket")
def test_figures_of_pocket_hold(rows: dict[str, Row]) -> None:
    """Floors below what one H200 gave: docs/results/pocket.md."""
    floors = {"native MTP": 2.6, "constant-K suffix": 1.65, "constant-K ngram 1/5": 1.6}
    for name, floor in floors.items():
        tau = rows[name].tau
        assert tau is not None
        assert tau >= floor, rows[name].show()


def test_vllms_own_ngram_forks_or_dies(rows: dict[str, Row]) -> None:
    """vLLM #39273 in 0.31.0. Should this fail one day, it is fixed."""
    row = rows["vLLM's ngram 2/5"]
    assert row.forks is None or row.forks.real_fork > 0, row.show()


@pytest.mark.skipif(
    "PACELINE_GPU_COMPILED" not in os.environ, reason="two compiled starts: two minutes more"
)
def test_one_shape_keeps_full_cuda_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, one stream: time a step with K drafted tokens against a step without any."""
    monkeypatch.setattr("paceline.serve.endpoint.check_plan", lambda plan: [])
    named = os.environ.get("PACELINE_GPU_TARGET")
    target = read_target(named or make_toy_hybrid(tmp_path / "toy"))
    requests = build_requests(target, 24)
    length = min(target.max_position_embeddings, 2048)
    for name in (None, "vLLM's ngram 2/5", "constant-K ngram 1/5", "constant-K suffix"):
        draft = None if name is None else write_draft(ARMS[name], tmp_path / name)
        plan = plan_arm(target, draft, "cuda", length)
        args = {**plan.engine_args, "enforce_eager": False}
        plan = dataclasses.replace(plan, engine_args=args)
        with start(plan, log_path=tmp_path / "engine.log") as endpoint:
            endpoint.generate(requests[:4])
            answers = endpoint.generate(requests[4:])
        times = [answer.tpot_ms for answer in answers if answer.tpot_ms is not None]
        tpot, tau = sorted(times)[len(times) // 2], delivered_tau(answers)
        step = f"{tpot:6.2f} ms a token, tau {tau:.2f}, {tpot * tau:6.2f} ms a step"
        print(f"{name or 'no draft':24} {step}")
