"""The recording of quantized products: it takes the same products as the ops do, and measures them."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import QuantSpec
from lab.studies.gemm_trace import KERNEL, QUANTIZATION, fake_quantized, in_bf16, in_promoted_fp22, same_inputs
from lab.studies.harness.products import Operands, ProductRecorder
from lab.studies.harness.spoiled import with_ops

SPEC = QuantSpec.preset("fp8_block_pow2")
COUNTS = torch.tensor([40, 0, 100])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(recorder: ProductRecorder | None) -> list[Tensor]:
    """Of an FP8 product and, behind it, products of three groups, the second empty: output, dx, and each dw."""
    x, w = random(140, 256, seed=0).requires_grad_(), random(128, 256, seed=1).requires_grad_()
    experts = [random(256, 128, seed=2 + index).requires_grad_() for index in range(3)]
    with with_ops(**recorder.ops() if recorder else {}):
        hidden = ops.fp8_linear(x, w, ops.trained_operand(w, SPEC.weight), SPEC)
        out = grouped_linear(hidden, COUNTS, experts, ops.group_operand(experts, SPEC.weight), SPEC)
        out.backward(random(140, 256, seed=9))
    return [out, *(tensor.grad for tensor in (x, w, experts[0], experts[2]))]


def test_recorded_products_are_those_of_the_ops() -> None:
    """Up to the order in which the matrix library adds, which a few values' rounding shows."""
    recorder = ProductRecorder(fake_quantized)
    for mine, theirs in zip(gradients(recorder), gradients(None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-2)
        assert (mine == theirs).double().mean() > 0.99
    assert recorder.roles == ["fprop"] * 3 + ["dgrad", "wgrad"] * 3
    assert [len(out) for out in recorder.outputs[:3]] == [140, 40, 100]


def test_products_that_are_not_quantized_are_other_ones() -> None:
    plain, fake = gradients(ProductRecorder(in_bf16)), gradients(ProductRecorder(fake_quantized))
    assert all((a == b).double().mean() < 0.5 for a, b in zip(plain, fake, strict=True))


def test_a_product_with_zeros_is_taken_and_not_kept() -> None:
    recorder = ProductRecorder(fake_quantized, same_inputs)
    x, w = random(20, 128, seed=0).requires_grad_(), random(128, 128, seed=1)
    with with_ops(**recorder.ops()):
        out = ops.fp8_linear(x, w, ops.trained_operand(w, SPEC.weight), SPEC)
        out.backward(torch.zeros_like(out))
    assert recorder.roles == ["fprop"]
    assert len(recorder.measured) == 1
    assert x.grad is not None
    assert not x.grad.any()


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
