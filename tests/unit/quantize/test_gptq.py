"""GPTQ against the same rule written the slow way, in float64; and grids against hand-made ones."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from paceline.draft import Scheme, dequantize_tensors, pack_codes, unpack_codes  # noqa: E402
from paceline.errors import DataError, DraftError, PlanError  # noqa: E402
from paceline.quantize.gptq import gptq, inverse_factor  # noqa: E402
from paceline.quantize.grid import (  # noqa: E402
    build_tensors,
    choose_scales,
    expand_scales,
    output_error,
    round_codes,
    round_to_nearest,
)
from paceline.quantize.schemes import SCHEMES, choose_scheme, require_group  # noqa: E402


def build_layer(rows: int = 24, columns: int = 64, seed: int = 0):  # type: ignore[no-untyped-def]
    """A weight and inputs whose columns go together and differ in size, in float64."""
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=make, dtype=torch.float64)
    mix = torch.randn(columns, columns, generator=make, dtype=torch.float64)
    sizes = torch.rand(columns, generator=make, dtype=torch.float64) * 4 + 0.1
    inputs = (torch.randn(4 * columns, columns, generator=make, dtype=torch.float64) @ mix) * sizes
    return weight, inputs.T @ inputs / len(inputs)


def feed_back_slowly(weight, hessian, scheme, scale, order, damping):  # type: ignore[no-untyped-def]
    """Optimal brain surgeon in a fixed order: a fresh inverse of the free columns' H each time."""
    mean = hessian.diagonal().mean()
    damped = hessian + damping * mean * torch.eye(len(hessian), dtype=hessian.dtype)
    work, codes = weight.clone(), torch.empty_like(weight)
    wide = expand_scales(scale.to(weight.dtype), weight)
    free = list(order)
    while free:
        inverse = torch.linalg.inv(damped[free][:, free])
        column = free[0]
        codes[:, column] = round_codes(work[:, column] / wide[:, column], scheme)
        error = work[:, column] - codes[:, column] * wide[:, column]
        work[:, free] -= error[:, None] * (inverse[0] / inverse[0, 0])
        free = free[1:]
    return codes


@pytest.mark.parametrize(
    ("name", "group", "is_ordered"),
    [("w4a16", 32, True), ("w4a16", 16, False), ("w8a16", 0, True), ("fp8", None, True)],
)
def test_gptq_is_the_slow_rule(name: str, group: int | None, is_ordered: bool) -> None:
    weight, hessian = build_layer()
    scheme = choose_scheme(name, group)
    found = gptq(weight, hessian, scheme, dtype=torch.bfloat16, is_ordered=is_ordered)
    order = (
        torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist()
        if is_ordered
        else range(64)
    )
    expected = feed_back_slowly(weight, hessian, scheme, found.scale_RG, order, 0.01)
    assert torch.equal(found.codes_RC, expected)


def test_float32_takes_the_same_codes_but_for_ties() -> None:
    weight, hessian = build_layer(rows=48, columns=192)
    scheme = choose_scheme("w4a16", 32)
    exact = gptq(weight, hessian, scheme, dtype=torch.bfloat16)
    quick = gptq(weight.float(), hessian.float(), scheme, dtype=torch.bfloat16)
    assert torch.equal(exact.scale_RG, quick.scale_RG)
    assert float((exact.codes_RC != quick.codes_RC.double()).double().mean()) < 0.01
    errors = [output_error(weight, found.plain_RC, hessian) for found in (exact, quick)]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


@pytest.mark.parametrize("name", ["w4a16", "w8a16", "w8a8"])
def test_feedback_beats_rounding_on_the_layers_own_inputs(name: str) -> None:
    weight, hessian = build_layer(rows=64, columns=128, seed=3)
    scheme = choose_scheme(name)
    plain = round_to_nearest(weight, scheme, dtype=torch.bfloat16)
    fed_back = gptq(weight, hessian, scheme, dtype=torch.bfloat16)
    errors = [output_error(weight, found.plain_RC, hessian) for found in (plain, fed_back)]
    assert errors[1] < 0.5 * errors[0]


def test_best_codes_of_a_tiny_layer_by_trying_all() -> None:
    """Two columns, one row: the feedback finds the best of all 256 code pairs for its scale."""
    weight = torch.tensor([[1.3, -0.62]], dtype=torch.float64)
    hessian = torch.tensor([[4.0, 1.5], [1.5, 1.0]], dtype=torch.float64)
    scheme = Scheme(kind="int", num_bits=4, group_size=None)
    found = gptq(weight, hessian, scheme, dtype=torch.float64, damping=1e-9)
    scale = float(found.scale_RG)
    errors = {
        pair: output_error(weight, torch.tensor([pair], dtype=torch.float64) * scale, hessian)
        for pair in itertools.product(range(-8, 8), repeat=2)
    }
    assert tuple(int(code) for code in found.codes_RC[0]) == min(errors, key=errors.__getitem__)


def test_a_column_without_input_is_rounded_by_itself() -> None:
    weight, hessian = build_layer()
    hessian[5], hessian[:, 5] = 0.0, 0.0
    scheme = choose_scheme("w4a16", 32)
    found = gptq(weight, hessian, scheme, dtype=torch.bfloat16)
    alone = round_codes(weight[:, 5] / found.scale_RG[:, 0].double(), scheme)
    assert torch.equal(found.codes_RC[:, 5], alone)
    assert bool(found.plain_RC.isfinite().all())


def test_one_row_of_input_is_damped_and_nan_is_refused() -> None:
    _, hessian = build_layer()
    single = hessian[:1].T @ hessian[:1]
    assert bool(inverse_factor(single).isfinite().all())
    hessian[3, 3] = torch.nan
    with pytest.raises(DataError, match="no usable second moment"):
        inverse_factor(hessian)


def test_scales_are_rounded_before_the_weights_are() -> None:
    """1.003 / 7.5 is not a bfloat16 number: codes must be those of the scale that is stored."""
    weight = torch.tensor([[1.003, -0.47, 0.2, 0.0, 0.7, -1.0, 0.3, 0.01]])
    scheme = Scheme(kind="int", num_bits=4, group_size=None)
    found = round_to_nearest(weight, scheme, dtype=torch.bfloat16)
    stored = torch.tensor(1.003 / 7.5).bfloat16()
    assert found.scale_RG.item() == stored.item()
    assert torch.equal(found.codes_RC, (weight / stored.float()).round().clamp(-8, 7))


def test_a_group_of_zeros_and_a_searched_scale() -> None:
    scheme = choose_scheme("w4a16", 16)
    weight = torch.cat((torch.zeros(1, 16), torch.full((1, 16), 0.1)), dim=1)
    weight[0, 16] = 1.0
    scale = choose_scales(weight, scheme, dtype=torch.float32)
    assert scale.tolist() == [[1.0, pytest.approx(1 / 7.5)]]
    # the large weight's column never has input: the grid is made for the others
    ignored = torch.ones(32)
    ignored[16] = 0.0
    searched = choose_scales(weight, scheme, dtype=torch.float32, importance_C=ignored)
    assert float(searched[0, 1]) < float(scale[0, 1])


def test_fp8_codes_are_float8_numbers_and_clip() -> None:
    scheme = SCHEMES["fp8"]
    codes = round_codes(torch.tensor([[500.0, 1.06, -0.3]]), scheme)
    assert codes.tolist() == [[448.0, 1.0, -0.3125]]


# stored form


def test_words_by_hand() -> None:
    codes = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, 4]])
    word = sum((code + 8) << 4 * place for place, code in enumerate(codes[0].tolist()))
    assert pack_codes(codes, 4).tolist() == [[word - 2**32 if word >= 2**31 else word]]
    assert pack_codes(torch.tensor([[-128, 127, 0, 1]]), 8).tolist() == [[0x8180FF00 - 2**32]]


@pytest.mark.parametrize("num_bits", [4, 8])
def test_packing_goes_both_ways_and_is_the_libraries(num_bits: int) -> None:
    half = 2 ** (num_bits - 1)
    codes = torch.randint(-half, half, (6, 64), generator=torch.Generator().manual_seed(1))
    words = pack_codes(codes, num_bits)
    assert torch.equal(unpack_codes(words, num_bits, 64), codes.to(torch.int8))
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(words, helpers.pack_to_int32(codes.to(torch.int8), num_bits))


@pytest.mark.parametrize("name", list(SCHEMES))
def test_what_is_stored_is_what_was_measured(name: str) -> None:
    weight, hessian = build_layer()
    dtype = torch.bfloat16 if SCHEMES[name].is_packed else torch.float32
    found = gptq(weight.float(), hessian.float(), SCHEMES[name], dtype=dtype)
    tensors = {**build_tensors("midlayer.fc", found), "norm.weight": torch.ones(3)}
    plain = dequantize_tensors(tensors)
    assert set(plain) == {"midlayer.fc.weight", "norm.weight"}
    assert torch.equal(plain["midlayer.fc.weight"], found.plain_RC.to(dtype))


def test_stored_parts_that_do_not_belong_together_are_refused() -> None:
    found = round_to_nearest(torch.ones(8, 64), SCHEMES["w4a16"], dtype=torch.bfloat16)
    tensors = dict(build_tensors("fc", found))
    with pytest.raises(DraftError, match="weight_scale' is missing"):
        dequantize_tensors({k: v for k, v in tensors.items() if not k.endswith("scale")})
    with pytest.raises(DraftError, match=r"fc\.weight' is missing"):
        dequantize_tensors({"fc.weight_scale": tensors["fc.weight_scale"]})
    with pytest.raises(DraftError, match="3 groups for 64 inputs"):
        dequantize_tensors({**tensors, "fc.weight_scale": torch.ones(8, 3)})
    with pytest.raises(DraftError, match="does not fit 4 bits"):
        pack_codes(torch.full((1, 8), 8), 4)
    with pytest.raises(DraftError, match="whole 32-bit words"):
        pack_codes(torch.zeros(1, 12), 4)


def test_group_sizes() -> None:
    assert choose_scheme("w4a16", 0).group_size is None
    with pytest.raises(PlanError, match="has no effect with fp8"):
        choose_scheme("fp8", 128)
    with pytest.raises(PlanError, match="unknown"):
        choose_scheme("w3a16")
    with pytest.raises(PlanError, match="multiple of 8"):
        choose_scheme("w4a16", 12)
    with pytest.raises(PlanError, match=r"128 does not divide the 576 inputs of .fc.; .*64"):
        require_group(choose_scheme("w4a16", 128), {"fc": (576, 576)})
    with pytest.raises(PlanError, match="whole 32-bit words"):
        require_group(choose_scheme("w4a16", 0), {"fc": (576, 100)})
    require_group(choose_scheme("fp8"), {"fc": (576, 100)})
