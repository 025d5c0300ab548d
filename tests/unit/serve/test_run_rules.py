"""The run rules on scripted observations: what each tells, and that a sound draft tells nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from builders import build_draft

from paceline.draft import Draft, read_draft
from paceline.endpoint import Answer, MemoryFacts
from paceline.errors import EngineError
from paceline.methods import METHODS
from paceline.serve import Isolation, Observed, RunCase, Told, check_observed
from paceline.serve.failure import explain
from paceline.serve.run_loaded import engine_key

WHOLE = Isolation(mode="user", missing=())


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    """Hidden 16, 4 heads of 4, 2 for keys, inner size 32, 16 of 64 words: see builders.py."""
    return read_draft(build_draft(tmp_path / "draft"))


def sound_tensors() -> dict[str, int]:
    """The engine's own names and bytes of that draft, worked out by hand: 2 bytes an element."""
    layer = "model.layers.0"
    return {
        f"{layer}.input_layernorm.weight": 32,
        f"{layer}.post_attention_layernorm.weight": 32,
        f"{layer}.hidden_norm.weight": 32,
        "model.norm.weight": 32,
        f"{layer}.self_attn.qkv_proj.weight": 2 * (16 + 8 + 8) * 32,
        f"{layer}.self_attn.o_proj.weight": 2 * 16 * 16,
        f"{layer}.mlp.gate_up_proj.weight": 2 * 64 * 16,
        f"{layer}.mlp.down_proj.weight": 2 * 16 * 32,
        "model.fc.weight": 2 * 16 * 48,
        "lm_head.weight": 2 * 64 * 16,  # 16 rows, padded to 64
        "draft_id_to_target_id": 8 * 16,
        f"{layer}.self_attn.attn._k_scale": 4,
    }


def build_memory(tensors: dict[str, int], *, kv_bytes: int = 1000) -> MemoryFacts:
    return MemoryFacts(
        context_tokens=16384,
        weights_bytes=sum(tensors.values()),
        buffers_bytes=0,
        kv_bytes=kv_bytes,
        state_bytes=0,
        shared=(
            "model.embed_tokens.weight",
            "model.layers.0.self_attn.rotary_emb.cos_sin_cache",
        ),
        tensors=tensors,
    )


def build_answer(
    accepted: tuple[int, ...], *, num_steps: int | None = None, num_prompt: int = 5
) -> Answer:
    """One prefill, then num_steps decode steps of which len(accepted) carried three drafts."""
    steps = len(accepted) if num_steps is None else num_steps
    return Answer(
        request_id="a",
        prompt_ids=tuple(range(num_prompt)),
        output_ids=(1,) * (steps + 1),
        finish_reason="length",
        sent_at_s=0.0,
        chunk_times_s=tuple(map(float, range(steps + 1))),
        chunk_tokens=(1,) * (steps + 1),
        per_step_accepted=accepted,
        per_step_drafted=(3,) * len(accepted),
    )


def build_case(draft: Draft, **changes: Any) -> RunCase:
    case: dict[str, Any] = {
        "context_tokens": 16384,
        "num_long_tokens": 16340,
        "estimate_bytes": sum(sound_tensors().values()) + 1000,
    }
    seen: dict[str, Any] = {
        "isolation": WHOLE,
        "memory": build_memory(sound_tensors()),
        "architectures": ("LlamaForCausalLMEagle3",),
        "answers": [build_answer((1, 0, 3) * 20), build_answer((0, 0, 1) * 20)],
        "long_answer": build_answer((0,) * 20, num_prompt=16340),
        "logits": {"num_rows": 400, "num_bad_rows": 0, "largest": 30.0},
    }
    for name, value in changes.items():
        (case if name in (*case, "is_hybrid") else seen)[name] = value
    return RunCase(draft=draft, seen=Observed(**seen), **case)


def told(case: RunCase) -> dict[str, list[Told]]:
    found: dict[str, list[Told]] = {}
    for item in check_observed(case):
        found.setdefault(item.problem.rule, []).append(item)
    return found


def test_what_the_engine_makes_of_dflash_weights_is_no_tensor_of_a_file(draft: Draft) -> None:
    own = {
        "model._fused_kv_weight": 2 * 16 * 16,
        "model._k_norm_weights": 8,
        "model.mask_embedding": 32,
    }
    memory = build_memory({**sound_tensors(), **own})
    assert "run.loaded" not in told(build_case(draft, memory=memory))
    stray = build_memory({**sound_tensors(), "model.unmask_embedding": 32})
    assert "run.loaded" in told(build_case(draft, memory=stray))


def test_a_sound_draft_tells_notes_only(draft: Draft) -> None:
    found = check_observed(build_case(draft))
    assert [(item.problem.rule, item.severity) for item in found] == [
        ("run.sandbox", "note"),
        ("run.mem", "note"),
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("midlayer.self_attn.q_proj.weight", "self_attn.qkv_proj.weight"),
        ("model.layers.0.self_attn.qkv_proj.weight", "self_attn.qkv_proj.weight"),
        ("layers.1.mlp.up_proj.weight", "mlp.gate_up_proj.weight"),
        ("fc.weight", "fc.weight"),
        ("model.fc.weight", "fc.weight"),
        ("d2t", "draft_id_to_target_id"),
        ("mtp.layers.0.input_layernorm.weight", "input_layernorm.weight"),
    ],
)
def test_names_of_files_and_engine_meet(name: str, key: str) -> None:
    assert engine_key(name) == key


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        # the file's tensor is nowhere in the engine
        ({"model.fc.weight": None}, None, "'fc.weight' was not loaded"),
        ({"draft_id_to_target_id": None}, None, "'d2t' was not loaded"),
        # the engine runs on something that no file holds
        ({"model.layers.0.extra_norm.weight": 32}, None, "runs on 'extra_norm.weight' of which no"),
        # the fused matrix is too small, or a second layer was built
        ({"model.layers.0.self_attn.qkv_proj.weight": 512}, None, "takes 512 bytes in the engine"),
        ({"model.layers.1.mlp.down_proj.weight": 1024}, None, "takes 2,048 bytes in the engine"),
        ({"lm_head.weight": 2 * 16 * 16 * 64}, None, "'lm_head.weight' takes"),
    ],
)
def test_loaded(
    change: dict[str, int | None], severity: str | None, words: str, draft: Draft
) -> None:
    tensors = {k: v for k, v in {**sound_tensors(), **change}.items() if v is not None}
    found = told(build_case(draft, memory=build_memory(tensors)))["run.loaded"]
    assert [item.severity for item in found] == [severity]
    assert words in found[0].problem.message


def test_loaded_but_replaced_by_the_targets(draft: Draft) -> None:
    tensors = {name: size for name, size in sound_tensors().items() if name != "lm_head.weight"}
    memory = dataclasses.replace(build_memory(tensors), shared=("lm_head.weight",))
    found = told(build_case(draft, memory=memory))["run.loaded"]
    assert [(item.severity, "target's own" in item.problem.message) for item in found] == [
        ("warning", True)
    ]


@pytest.mark.parametrize(("share", "is_over"), [(1.0, False), (1.05, False), (1.051, True)])
def test_memory_against_the_estimate(share: float, is_over: bool, draft: Draft) -> None:
    measured = 100_000
    tensors = sound_tensors()
    memory = build_memory(tensors, kv_bytes=measured - sum(tensors.values()))
    found = told(build_case(draft, memory=memory, estimate_bytes=measured / share))["run.mem"]
    assert (found[0].severity is None) == is_over


@pytest.mark.parametrize(
    ("family", "is_hybrid", "severity"),
    [
        ("eagle3", False, None),
        ("eagle3", True, "warning"),
        ("mtp", True, None),
        ("medusa", False, "warning"),
    ],
)
def test_what_was_not_held_against_the_engine_only_warns(
    family: str, is_hybrid: bool, severity: str | None, draft: Draft
) -> None:
    """No folder is refused for what vLLM may do otherwise with another family or target."""
    tensors = {**sound_tensors(), "model.layers.0.extra.weight": 10**6}
    case = build_case(
        dataclasses.replace(draft, family=family),
        is_hybrid=is_hybrid,
        memory=build_memory(tensors),
        architectures=("Another",),
    )
    found = told(case)
    for rule in ("run.loaded", "run.mem", "run.method"):
        assert [item.severity for item in found[rule]] == [severity], rule


def test_memory_without_an_estimate_is_a_note(draft: Draft) -> None:
    assert told(build_case(draft, estimate_bytes=None))["run.mem"][0].severity == "note"


@pytest.mark.parametrize(
    ("logits", "severity", "words"),
    [
        ({"num_rows": 40, "num_bad_rows": 3, "largest": 1.0}, None, "3 of 40 rows"),
        ({"num_rows": 0, "num_bad_rows": 0, "largest": 0.0}, "warning", "were not seen"),
    ],
)
def test_finite(logits: dict[str, Any], severity: str | None, words: str, draft: Draft) -> None:
    found = told(build_case(draft, logits=logits))["run.finite"]
    assert (found[0].severity, words in found[0].problem.message) == (severity, True)


@pytest.mark.parametrize(("num_steps", "is_short"), [(20, False), (21, True), (200, True)])
def test_coverage_of_the_long_prompt(num_steps: int, is_short: bool, draft: Draft) -> None:
    answer = build_answer((0,) * 20, num_steps=num_steps)
    found = told(build_case(draft, long_answer=answer)).get("run.coverage", [])
    assert [item.severity for item in found] == ([None] if is_short else [])
    if is_short:
        assert f"20 of {num_steps} decode steps" in found[0].problem.message
        assert "16,340 tokens" in found[0].problem.message


def test_coverage_of_ordinary_prompts(draft: Draft) -> None:
    """Drafts on 400 of 401 steps are enough, on 397 of 400 not."""
    enough = [build_answer((1,) * 400, num_steps=401)]
    assert "run.coverage" not in told(build_case(draft, answers=enough))
    short = [build_answer((1,) * 397, num_steps=400)]
    assert "ordinary" in told(build_case(draft, answers=short))["run.coverage"][0].problem.message


def test_shorter_coverage_states_its_figure(draft: Draft) -> None:
    found = told(build_case(draft, num_long_tokens=2048))["run.coverage"]
    assert found[0].severity == "note"
    assert "2,048 tokens" in found[0].problem.message
    assert "16,384" in found[0].problem.message


@pytest.mark.parametrize(
    ("taken", "steps", "is_zero"),
    [(0, 60, True), (1, 60, True), (2, 60, False), (0, 49, False), (1, 50, False)],
)
def test_zero(taken: int, steps: int, is_zero: bool, draft: Draft) -> None:
    answers = [build_answer((1,) * taken + (0,) * (steps - taken))]
    found = told(build_case(draft, answers=answers))
    assert ("run.zero" in found) == is_zero
    if is_zero:
        assert f"{taken} of {steps} steps" in found["run.zero"][0].problem.message


def test_method_and_architecture(draft: Draft) -> None:
    problem = EngineError("the engine resolved method to 'ngram', the plan says 'eagle3'")
    case = build_case(draft, facts_problem=problem, architectures=("LlamaForCausalLM",))
    found = told(case)["run.method"]
    assert "resolved method to 'ngram'" in found[0].problem.message
    assert found[1].problem.found == "LlamaForCausalLM"


def test_an_mtp_head_by_the_name_that_vllm_gives_it(draft: Draft) -> None:
    head = dataclasses.replace(
        draft, family="mtp", config={**draft.config, "architectures": ["Qwen3_5ForCausalLM"]}
    )
    assert "run.method" not in told(build_case(head, architectures=("Qwen3_5MTP",)))
    assert "run.method" in told(build_case(head, architectures=("Qwen3_5ForCausalLM",)))


@pytest.mark.parametrize(
    ("ended_for", "words"),
    [
        ("", "the engine died while starting: KeyError: 'x'"),
        ("memory", "9,000 bytes of memory and was ended; the limit is 5,000"),
        ("time", "longer than the time limit"),
    ],
)
def test_boot(ended_for: str, words: str, draft: Draft) -> None:
    error = EngineError("the engine died while starting: KeyError: 'x'", fix="Look.")
    seen = Observed(
        isolation=WHOLE,
        doing="starting",
        error=error,
        ended_for=ended_for,
        peak_bytes=9000,
        memory_limit_bytes=5000,
    )
    case = RunCase(
        draft=draft, seen=seen, context_tokens=16384, num_long_tokens=100, estimate_bytes=1
    )
    found = told(case)
    assert set(found) == {"run.sandbox", "run.boot"}
    assert found["run.boot"][0].severity is None
    assert words in found["run.boot"][0].problem.message
    assert found["run.boot"][0].problem.fix


def test_boot_tells_the_last_line_of_the_log(draft: Draft, tmp_path: Path) -> None:
    """The engine's error quotes a dozen lines; a finding is one."""
    log_path = tmp_path / "engine.log"
    log_path.write_text("one\ntwo\nValueError: no module named x\n")
    error = explain("died while starting", message="", exit_code=1, log_path=log_path)
    case = build_case(draft, error=error, doing="starting")
    fix = told(case)["run.boot"][0].problem.fix
    assert "\n" not in fix
    assert str(log_path) in fix
    assert fix.endswith("It ends: ValueError: no module named x")


def test_a_family_that_is_not_served_here_is_no_fault_of_the_draft(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dataclasses.replace(METHODS["dflash"], serves=False)
    monkeypatch.setitem(METHODS, "dflash", row)
    other = dataclasses.replace(draft, family="dflash")
    case = build_case(other, error=EngineError("method 'dflash' cannot be served yet"))
    assert told(case)["run.boot"][0].severity == "note"


def test_weaker_walls_are_told(draft: Draft) -> None:
    weak = Isolation(mode="none", missing=("no namespaces here: network within reach",))
    found = told(build_case(draft, isolation=weak))["run.sandbox"]
    assert found[0].severity is None
    assert "network within reach" in found[0].problem.message
