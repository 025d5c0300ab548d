"""What vLLM's CPU build runs, told before anything starts."""

from __future__ import annotations

from paceline.draft import explain_no_cpu_kernel, find_cpu_kernel
from paceline.quantize import SCHEMES
from paceline.quantize.schemes import build_group, build_settings


def settings(*names: str) -> dict[str, object]:
    return build_settings([build_group(SCHEMES[name], ["Linear"]) for name in names], [])


def test_by_scheme() -> None:
    found = {name: find_cpu_kernel(scheme) for name, scheme in SCHEMES.items()}
    assert found == {
        "w4a16": "CPUWNA16LinearKernel",
        "w8a16": None,
        "w8a8": "CPUInt8ScaledMMLinearKernel",
        "fp8": "ChannelWiseTorchFP8ScaledMMLinearKernel",
    }
    for name, kernel in found.items():
        reason = explain_no_cpu_kernel(settings(name), {})
        assert (reason is None) == (kernel is not None)
    assert "w8a16" in str(explain_no_cpu_kernel(settings("w4a16", "w8a16"), {}))


def test_by_size_of_the_fused_matrix() -> None:
    four = settings("w4a16")
    sound = {
        "a.q_proj.weight_packed": (48, 8),
        "a.k_proj.weight_packed": (8, 8),
        "a.v_proj.weight_packed": (8, 8),
        "lm_head.weight_packed": (100, 8),
    }
    assert explain_no_cpu_kernel(four, sound) is None
    odd = {**sound, "a.v_proj.weight_packed": (16, 8)}
    assert "'a.q_proj', fused, has 72 outputs" in str(explain_no_cpu_kernel(four, odd))
    narrow = {"a.o_proj.weight_packed": (64, 6)}
    assert "'a.o_proj' has 48 inputs" in str(explain_no_cpu_kernel(four, narrow))
    assert explain_no_cpu_kernel(settings("w8a8"), narrow) is None
    assert explain_no_cpu_kernel({"quant_method": "gptq"}, narrow) is None
