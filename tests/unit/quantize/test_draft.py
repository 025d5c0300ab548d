"""A tiny draft through the whole room: what is written, what is refused, what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from builders import VOCAB, build_draft, build_target_facts  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from paceline.draft import (  # noqa: E402
    Draft,
    count_parameters,
    dequantize_tensors,
    read_draft,
    read_scheme,
    read_tensors,
)
from paceline.errors import DataError, DraftError, PlanError  # noqa: E402
from paceline.quantize import choose_scheme, plan_draft, quantize_draft  # noqa: E402
from paceline.quantize.schemes import SCHEMES  # noqa: E402
from paceline.validate import validate_draft  # noqa: E402


class Inputs:
    """A draft at work on made-up inputs; remembers the weights that it was given each time."""

    def __init__(self, draft: Draft, poison: str = "") -> None:
        self.shapes = {
            name.removesuffix(".weight"): info.shape
            for name, info in draft.tensors.items()
            if name.endswith(".weight") and len(info.shape) == 2
        }
        self.given: list[dict[str, Any]] = []
        self.poison = poison

    def observe(self, seen: Callable[[str, str, Any], None], weights: Mapping[str, Any]) -> None:
        self.given.append(dict(weights))
        make = torch.Generator().manual_seed(0)
        for module, shape in self.shapes.items():
            inputs = torch.randn(64, shape[1], generator=make)
            if module == self.poison:
                inputs[3, 0] = torch.nan
            seen("row-9", module, inputs)


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return read_draft(build_draft(tmp_path / "draft"))


def choose(name: str, **changes: Any) -> Any:
    import dataclasses

    scheme = choose_scheme(name, 16 if name == "w4a16" else None)
    return dataclasses.replace(scheme, **changes)


@pytest.mark.parametrize("name", list(SCHEMES))
@pytest.mark.parametrize("has_head", [False, True])
def test_written_read_and_valid(name: str, has_head: bool, draft: Draft, tmp_path: Path) -> None:
    plan = plan_draft(draft, choose(name, has_head=has_head))
    done = quantize_draft(plan, tmp_path / "out", calibration=Inputs(draft), where="rows")
    scheme = read_scheme("eagle3", done.config)
    assert scheme == choose(name, has_head=has_head)
    plain = dequantize_tensors(read_tensors(done))
    before = read_tensors(draft)
    assert set(plain) == set(before)
    quantised = {f"{module}.weight" for module in plan.modules}
    assert ("lm_head.weight" in quantised) == has_head
    for tensor_name, tensor in before.items():
        if tensor_name in quantised:
            off = (plain[tensor_name].float() - tensor.float()).norm() / tensor.float().norm()
            assert 0 < float(off) < (0.2 if name == "w4a16" else 0.05)
        else:
            assert torch.equal(plain[tensor_name], tensor)
    report = validate_draft(done.path, target=build_target_facts())
    assert report.verdict != "fail", [f.message for f in report.findings if f.severity == "error"]
    report = validate_draft(done.path, target=build_target_facts(), deep=True)
    told = [f for f in report.findings if f.rule in ("meta.keys", "ten.dtype", "ten.norm")]
    assert not [*told, *(f for f in report.findings if f.rule.startswith("q."))]
    assert done.metadata["quantized"]["from_sha256"] == draft.sha256


def test_each_stage_reads_what_is_quantised_before_it(draft: Draft, tmp_path: Path) -> None:
    plan = plan_draft(draft, choose("w4a16"))
    assert [len(stage) for stage in plan.stages] == [1, 3, 1, 2, 1]
    inputs = Inputs(draft)
    done = quantize_draft(plan, tmp_path / "out", calibration=inputs, where="rows")
    before, after = read_tensors(draft), dequantize_tensors(read_tensors(done))
    assert len(inputs.given) == len(plan.stages)
    for number, weights in enumerate(inputs.given):
        for at, stage in enumerate(plan.stages):
            for module in stage:
                name = f"{module}.weight"
                wanted = after[name] if at < number else before[name]
                assert torch.equal(weights[name].float(), wanted.float()), (number, name)


def test_rounding_needs_no_rows_and_gptq_does(draft: Draft, tmp_path: Path) -> None:
    plan = plan_draft(draft, choose("w4a16"), method="rtn")
    done = quantize_draft(plan, tmp_path / "rtn")
    errors = done.metadata["quantized"]["modules"]
    assert {told["output_error"] for told in errors.values()} == {None}
    with pytest.raises(PlanError, match="GPTQ needs the draft's own inputs"):
        quantize_draft(plan_draft(draft, choose("w4a16")), tmp_path / "gptq")
    assert not (tmp_path / "gptq").exists()


def test_kept_matrices_stay_and_are_ignored_by_vllm(draft: Draft, tmp_path: Path) -> None:
    plan = plan_draft(draft, choose("w4a16"), method="rtn", keep=["fc", "gate_proj", "up_proj"])
    done = quantize_draft(plan, tmp_path / "out")
    settings = done.config["quantization_config"]
    assert settings["ignore"] == ["re:.*fc$", "re:.*gate_proj$", "re:.*up_proj$"]
    assert "fc.weight" in done.tensors
    assert "midlayer.mlp.down_proj.weight_packed" in done.tensors
    with pytest.raises(PlanError, match="gate_proj without the rest of gate_proj, up_proj"):
        plan_draft(draft, choose("w4a16"), keep=["gate_proj"])
    with pytest.raises(PlanError, match="'nonsense' names no matrix"):
        plan_draft(draft, choose("w4a16"), keep=["nonsense"])


def test_a_parallel_draft_keeps_the_matrix_that_reads_its_masked_state(tmp_path: Path) -> None:
    """vLLM 0.31.0 runs `fc` on mask_hidden as a row: its 4-bit and 8-bit kernels fail on it."""
    path = build_draft(tmp_path / "draft", config={"mask_token_id": 3})
    tensors = {**load_file(path / "model.safetensors"), "mask_hidden": torch.zeros(1, 3 * 16)}
    tensors["mask_hidden"] = tensors["mask_hidden"].to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    plan = plan_draft(read_draft(path), choose("w4a16"), method="rtn")
    assert plan.kept == ("fc",)
    done = quantize_draft(plan, tmp_path / "out")
    assert done.config["quantization_config"]["ignore"] == ["re:.*fc$"]
    assert "fc.weight" in done.tensors


def test_inputs_that_are_not_numbers_leave_nothing_behind(draft: Draft, tmp_path: Path) -> None:
    plan = plan_draft(draft, choose("w4a16"))
    poisoned = Inputs(draft, poison="midlayer.self_attn.o_proj")
    with pytest.raises(DataError, match=r"rows: row 'row-9' gives 'midlayer\.self_attn\.o_proj'"):
        quantize_draft(plan, tmp_path / "out", calibration=poisoned, where="rows")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    import numpy as np
    from builders import encode_bf16

    bad = ("BF16", (16,), encode_bf16(np.full(16, np.nan, dtype=np.float32)))
    folder = build_draft(tmp_path / "bad", tensors={"norm.weight": bad})
    plan = plan_draft(read_draft(folder), choose("w4a16"), method="rtn")
    with pytest.raises(DraftError, match=r"model\.safetensors: tensor 'norm\.weight' holds NaN"):
        quantize_draft(plan, tmp_path / "out")


def test_what_vllm_cannot_express_is_refused_with_its_reason(draft: Draft, tmp_path: Path) -> None:
    import dataclasses

    for family, told in (
        ("mtp", "one of its own cannot be expressed"),
        ("medusa", "no place for packed weights"),
        ("ngram", "has no weights"),
    ):
        other = dataclasses.replace(draft, family=family)
        with pytest.raises(DraftError, match=told):
            plan_draft(other, choose("w4a16"))
    done = quantize_draft(plan_draft(draft, choose("fp8"), method="rtn"), tmp_path / "once")
    with pytest.raises(DraftError, match="quantised already"):
        plan_draft(done, choose("fp8"))
    with pytest.raises(PlanError, match="does not divide the 48 inputs of 'fc'"):
        plan_draft(draft, choose_scheme("w4a16", 32))
    with pytest.raises(PlanError, match="method 'awq' is unknown"):
        plan_draft(draft, choose("w4a16"), method="awq")


def test_the_config_says_what_vllm_reads(draft: Draft, tmp_path: Path) -> None:
    plan = plan_draft(draft, choose("w8a8", has_head=True), method="rtn")
    done = quantize_draft(plan, tmp_path / "out")
    settings = json.loads((done.path / "config.json").read_text())["quantization_config"]
    group = settings["config_groups"]["group_0"]
    assert settings["format"] == group["format"] == "int-quantized"
    assert group["targets"] == ["Linear", "re:.*lm_head"]
    assert group["input_activations"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
    }
    assert done.tensors["fc.weight"].dtype == "I8"
    assert done.tensors["lm_head.weight_scale"].shape == (len(read_tensors(draft)["d2t"]), 1)
    assert done.config["vocab_size"] == VOCAB


@pytest.mark.parametrize("name", list(SCHEMES))
def test_packing_hides_no_parameters(name: str, draft: Draft, tmp_path: Path) -> None:
    done = quantize_draft(plan_draft(draft, choose(name), method="rtn"), tmp_path / "out")
    assert done.num_parameters == draft.num_parameters
    settings = {**done.config, "quantization_config": {"quant_method": "else"}}
    assert count_parameters(done.tensors, settings) >= draft.num_parameters
