"""Products as studies compute and measure them, against float64 and by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import QuantSpec
from lab.studies.bf16 import (
    LENGTHS,
    PRODUCTS,
    added_in_bf16,
    as_the_machine_rounds,
    cut_off,
    facts,
    nearest,
    relative_error,
)
from lab.studies.gemm_trace import KERNEL, QUANTIZATION, fake_quantized, in_promoted_fp22, same_inputs
from lab.studies.harness.products import Operands, ProductRecorder, in_fp22, in_fp32
from lab.studies.harness.spoiled import with_ops
from lab.studies.prototypes.gated_delta import Rows, State, gated_delta
from lab.studies.scale_formats import CHANNELS, _Probe, error_name


def test_an_fp22_accumulator_loses_what_does_not_reach_its_13_bits() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 32] = 1.0, 2.0**-13 + 2.0**-14  # the second instruction adds to 1: bits below 2^-13 are cut off
    assert in_fp22(x, torch.ones(1, 64)).item() == 1 + 2.0**-13
    assert in_fp32(x, torch.ones(1, 64)).item() == 1 + 2.0**-13 + 2.0**-14
    x[0, 32] = 2.0**-14
    assert in_fp22(x, torch.ones(1, 64)).item() == 1.0


def test_a_probe_quantizes_one_operand_and_measures_in_float64(operands: Operands) -> None:
    probe = _Probe(0)
    probe(operands)
    x, w = operands.a.double(), operands.b.double()
    amax = x.abs().unflatten(1, (-1, 128)).amax(-1, keepdim=True)
    scale = 2.0 ** torch.floor(torch.log2(448.0 / amax))
    scaled = x.unflatten(1, (-1, 128)) * scale
    step = 2.0 ** (torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
    rounded = (torch.round(scaled / step) * step / scale).flatten(1)
    expected = float((rounded @ w.t() - x @ w.t()).norm() / (x @ w.t()).norm())
    assert probe.found["pow2 1x128"][error_name("activation", 1)] == [pytest.approx(expected, rel=1e-6)]


def test_outliers_change_no_product_and_spoil_a_scale_that_others_share(operands: Operands) -> None:
    probe = _Probe(0)
    probe(operands)

    def error(arm: str, factor: float) -> float:
        return probe.found[arm][error_name("activation", factor)][0]

    assert error("FP32 tensor", 1e4) > 1.3 * error("FP32 tensor", 1)
    assert error("FP32 1x32", 1e4) < 1.2 * error("FP32 1x32", 1)
    assert error("E5M2 1x128", 1) == pytest.approx(2 * error("pow2 1x128", 1), rel=0.1)
    # 1% of the channels carry 1% of the product's squares; without them, as all saturate, the error is near a tenth.
    assert error("static 224", 1e4) == pytest.approx(CHANNELS**0.5, rel=0.4)


@pytest.fixture
def operands() -> Iterator[Operands]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 512, generator=generator).bfloat16(), torch.randn(96, 512, generator=generator).bfloat16()
    yield Operands("fprop", b, a, b, a, b)


SPEC = QuantSpec.preset("fp8_block_pow2")
COUNTS = torch.tensor([40, 0, 100])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(recorder: ProductRecorder | None) -> list[Tensor]:
    """Of an FP8 product and, behind it, products of three groups, the second empty: output, dx, and each dw."""
    x, w = random(140, 256, seed=0).requires_grad_(), random(128, 256, seed=1).requires_grad_()
    experts = random(3, 256, 128, seed=2).requires_grad_()
    with with_ops(**recorder.ops() if recorder else {}):
        hidden = ops.fp8_linear(x, w, ops.trained_operand(w, SPEC.weight), SPEC)
        out = grouped_linear(hidden, COUNTS, experts, ops.trained_operand(experts, SPEC.weight), SPEC)
        out.backward(random(140, 256, seed=9))
    return [out, *(tensor.grad for tensor in (x, w, experts))]


def test_recorded_products_are_those_of_the_ops() -> None:
    """Up to the order in which the matrix library adds, which a few values' rounding shows."""
    recorder = ProductRecorder(fake_quantized)
    for mine, theirs in zip(gradients(recorder), gradients(None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-2)
        assert (mine == theirs).double().mean() > 0.99
    assert recorder.roles == ["fprop"] * 3 + ["dgrad", "wgrad"] * 3
    assert [len(out) for out in recorder.outputs[:3]] == [140, 40, 100]


def test_errors_are_those_of_float64() -> None:
    a, b = random(32, 512, seed=0), random(48, 512, seed=1)
    quantized_a, quantized_b = fake_quantize(a, SPEC.activation), fake_quantize(b, SPEC.weight)
    operands = Operands("fprop", b, a, b, quantized_a, quantized_b)
    found = same_inputs(operands)
    exact, plain = quantized_a.double() @ quantized_b.double().t(), a.double() @ b.double().t()
    assert abs(found[f"{QUANTIZATION}, unrounded"] / float((exact - plain).norm() / plain.norm()) - 1) < 1e-3
    off = float((in_promoted_fp22(operands).double() - exact).norm() / exact.norm())
    assert abs(found[f"{KERNEL}, unrounded"] / off - 1) < 0.05
    assert found[f"{KERNEL}, unrounded"] < found["FP22 alone, unrounded"] < found[QUANTIZATION]


def test_the_oracle_rounds_as_by_hand() -> None:
    """1; half-way from 1 to the next, whose even one is 1, and from an odd one, and beyond; half the smallest subnormal
    and thrice it; the last that does not overflow, and the first that does."""
    fp32 = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF818000, 0x00008000, 0x00018000, 0x7F7F7FFF, 0x7F7F8000]
    bf16 = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x0000, 0x0002, 0x7F7F, 0x7F80]
    assert nearest(torch.tensor(fp32)).tolist() == bf16


def test_a_conversion_that_rounds_halves_up_is_found() -> None:
    def halves_up(x: Tensor) -> Tensor:
        return cut_off((x.view(torch.int32) + 0x8000).view(torch.float32))

    found = facts(halves_up, seed=0)
    assert found["halves to even"] == 0.5
    assert found["overflows to inf"] == 1
    assert found["NaN kept"] < 1  # 0x7fff.... becomes -0


def test_torch_converts_as_the_standard_says() -> None:
    found = facts(as_the_machine_rounds, seed=0)
    kept = ("widened by zeros", "rounded to nearest even", "halves to even", "overflows to inf", "NaN kept", "inf kept")
    assert [found[name] for name in kept] == [1] * len(kept)
    assert (found["stored bits"], found["spacing at 1"], found["spacing below 1"]) == (7, 2**-7, 2**-8)


def test_adding_in_bf16_rounds_after_every_product() -> None:
    """256 + 1 is half-way between 256 and 258 and goes to the even one, however often."""
    x, w = torch.ones(1, 40).bfloat16(), torch.ones(1, 40).bfloat16()
    w[0, 0] = 256
    assert added_in_bf16(x, w).item() == 256
    assert PRODUCTS["product"](x, w).item() == 296  # 295 in full, whose neighbours are 294 and 296


def test_the_error_of_adding_in_bf16_grows_with_the_length() -> None:
    short, long = (relative_error(added_in_bf16, k, seed=0) for k in (LENGTHS[0], 2048))
    assert long > 2 * short
    assert relative_error(PRODUCTS["product"], 2048, seed=0) < 0.002 < short


def test_chunks_give_the_same_bits_in_pieces_and_one_by_one_and_the_values_of_the_rule() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 150, 2, 16, generator=draw)
    v, decays = torch.randn(150, 2, 8, generator=draw), -torch.rand(150, 2, generator=draw)
    beta = torch.rand(150, 2, generator=draw)
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    rows = Rows(*(x.transpose(0, 1) for x in (unit[0] / 4, unit[1], v, decays, beta)))
    whole, _ = gated_delta(rows, State.empty(2, 16, 8))
    for size in (41, 1):
        state, found = State.empty(2, 16, 8), []
        for first in range(0, 150, size):
            out, state = gated_delta(rows.part(first, min(first + size, 150)), state)
            found.append(out)
        assert torch.equal(torch.cat(found, 1), whole)
    expected = ops.gated_delta_rule(q, k, v, decays, beta, torch.tensor([150]))
    torch.testing.assert_close(whole.transpose(0, 1), expected, rtol=0, atol=1e-6)
