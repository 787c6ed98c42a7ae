"""Where the kernels of these tests run, on the GPU at hand or in Triton's interpreter, and what they are given."""

import torch

import tests.support.interpreter  # noqa: F401
from fp8rl.numerics.quantize import QuantizedTensor, quantize

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Hopper's FP8 instruction aligns what it adds to the largest addend and keeps about 14 bits; BF16 keeps almost FP32's.
FP8_BITS, BF16_BITS = (14, 22) if GPU else (24, 24)


def random(*shape, seed=0, scale=1.0, dtype=torch.bfloat16):
    """Normal numbers, the same on every device."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def quantized(x, spec):
    """x as quantized on the CPU."""
    result = quantize(x, spec)
    return QuantizedTensor(result.data.to(DEVICE), result.scale_inv.to(DEVICE), spec)


def same(found, expected):
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def passed(op, *leaves, real=None):
    """Result and gradients under a fixed cotangent; real: the tokens that count."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = op(*leaves)
    dout = random(*out.shape, seed=4).to(out.dtype)
    out.backward(dout if real is None else dout * real[..., None, None])
    return [out, *(x.grad for x in leaves)]


def close_in_bf16(found, exact):
    """Of attention: weights, their gradients, the saved result and the gradient itself are rounded to BF16."""
    error = found.double() - exact
    assert error.norm() <= 2**-7 * exact.norm() + 1e-5 and error.abs().max() <= 2**-6 * exact.abs().max() + 1e-5
