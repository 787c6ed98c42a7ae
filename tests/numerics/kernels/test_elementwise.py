"""Norm, SwiGLU, RoPE, the sum over experts, digests and the gradient of an embedding against their definitions."""

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.digest import CHUNK, chunk_sums, stack_digests, tensor_digest, tensor_digests
from fp8rl.numerics.kernels import digest, gates, norm
from fp8rl.numerics.ops.experts import route
from fp8rl.numerics.ops.rope import Llama3
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import TensorSpec
from tests.support.atomics import Atomics
from tests.support.kernels import DEVICE, random


def close(found, expected, ulps=1):
    """Equal to within `ulps` roundings of BF16, of a value or of the largest of its kind where numbers cancel."""
    found, expected = found.double(), expected.double()
    assert torch.allclose(found, expected, rtol=ulps * 2**-8, atol=ulps * 2**-8 * expected.abs().max().item())


def gradients(function, *inputs):
    """Results of `function` and the gradients of its float inputs under a fixed random cotangent."""
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [random(*r.shape, seed=9 + i).to(r.dtype) for i, r in enumerate(results)])
    return [*results, *(x.grad for x in leaves if x.is_floating_point())]


def compared(function, *inputs):
    """Results and gradients by the kernels, which are close to those by the definitions; and the latter."""
    with using("triton"):
        found = gradients(function, *inputs)
    with using("torch"):
        expected = gradients(function, *inputs)
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    return found, expected


@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 4, 128), (3, 1000), (2, 7168)])
def test_rms_norm(shape):
    x, weight = random(*shape, scale=3), random(shape[-1], seed=1) + 1
    compared(lambda x, w: ops.rms_norm(x, w, 1e-6), x, weight)


def test_a_residual_is_added_and_rounded_before():
    x, residual, weight = random(6, 384), random(6, 384, seed=1), random(384, seed=2)
    found, _ = compared(lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-6), x, residual, weight)
    assert torch.equal(found[1], x + residual)


@pytest.mark.parametrize("scale", ("pow2", "fp32"))
@pytest.mark.parametrize("hidden", (128, 640, 2048))
def test_a_norm_that_quantizes_gives_the_codes_of_the_two_steps(hidden, scale):
    spec, x, weight = TensorSpec(scale=scale), random(9, hidden, scale=3), random(hidden, seed=1)
    x[4] = 0
    quantized, inverse_rms = norm.rms_norm_quantize(x, weight, 1e-6, spec)
    expected = quantize(norm.rms_norm_forward(x, weight, 1e-6), spec)
    assert torch.equal(quantized.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(quantized.scale_inv, expected.scale_inv)
    assert torch.allclose(inverse_rms.double(), (x.double().square().mean(1) + 1e-6).rsqrt(), rtol=1e-6)


def test_swiglu():
    compared(ops.swiglu, random(11, 2 * 300, scale=4))


def test_swiglu_that_quantizes_gives_the_codes_of_the_two_steps():
    spec, gate_up = TensorSpec(), random(13, 2 * 640, scale=4)
    gate_up[3] = 0
    found, expected = gates.swiglu_quantize(gate_up, spec), quantize(gates.swiglu_forward(gate_up), spec)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found.scale_inv, expected.scale_inv)


LLAMA3 = Llama3(factor=32.0, original=8192, low=1.0, high=4.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dim", "rotary", "scaling"),
    [(4, 128, None, None), (9, 64, None, LLAMA3), (1, 96, None, None), (9, 128, 64, None), (9, 128, 96, None)],
)
def test_rope_at_early_and_late_positions(heads, dim, rotary, scaling):
    x, positions = random(2, 3, heads, dim), torch.tensor([[0, 1, 2], [500, 40_000, 130_000]], device=DEVICE)
    found, expected = compared(lambda x: ops.rope(x, positions, 1e6, rotary, scaling), x)
    assert (found[0] != expected[0]).double().mean() < 0.01, "rounded otherwise"
    if rotary:
        with using("triton"):
            assert torch.equal(found[0][..., :rotary], ops.rope(x[..., :rotary], positions, 1e6))
        assert torch.equal(found[0][..., rotary:], x[..., rotary:])


@pytest.mark.parametrize("top_k", (1, 2, 5))
def test_combine(top_k):
    probs, experts = route(random(17, 8, dtype=torch.float32), top_k, True)
    order, _ = ops.group_by_expert(experts, 8)
    outputs = random(17 * top_k, 384, seed=3)
    found, expected = compared(lambda o, p: ops.combine(o, p, order, torch.bfloat16), outputs, probs.detach())
    assert torch.equal(found[0], expected[0])  # the same products and sums, none of them fused


@pytest.mark.parametrize(
    "strided",
    [lambda x: x[:1, :1].expand(x.shape), lambda x: x.t().contiguous().t()],
    ids=("one number for all", "columns"),
)
def test_rows_and_gradients_of_any_stride(strided):
    """The gradient of a sum is a view of one number."""
    x, weight = random(6, 256), random(256, seed=1)
    for op in (lambda x: ops.rms_norm(x, weight, 1e-6), ops.swiglu):
        results = []
        for copied in (False, True):
            leaf = strided(x).clone(memory_format=torch.contiguous_format) if copied else strided(x).detach()
            with using("triton"):
                out = op(leaf.requires_grad_())
                dy = strided(random(*out.shape, seed=2))
                (gradient,) = torch.autograd.grad(out, leaf, dy.contiguous() if copied else dy)
            results.append((out, gradient))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def tensors():
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 4, 7, 4 * CHUNK, 4 * CHUNK + 3, 10 * CHUNK + 12, 128)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator).to(DEVICE) for size in sizes]


def test_the_kernel_gives_the_digests_of_torch():
    expected = [tensor_digest(tensor) for tensor in tensors()]
    with using("triton"):
        assert tensor_digests(tensors()) == expected and tensor_digests(tensors()[::-1]) == expected[::-1]
        assert [tensor_digest(tensor) for tensor in tensors()] == expected, "aligned, where others in a launch are not"
        stacks = [tensors()[-2].view(2, -1)[:, : 4 * CHUNK + 8], tensors()[3].view(8, -1)[1::3, 3:]]
        found = stack_digests(stacks)
    assert found == [tensor_digest(tensor) for stack in stacks for tensor in stack]


def test_tensors_of_a_cpu_are_summed_where_kernels_are_compiled(monkeypatch):
    """No compiled kernel reads them."""
    words = [tensor.cpu()[:64].view(torch.int32)[None] for tensor in tensors() if len(tensor) >= 64]
    expected = chunk_sums(words)
    monkeypatch.setattr(digest, "_kernel", None)
    monkeypatch.setattr(digest.triton.knobs.runtime, "interpret", False)
    with using("triton"):
        assert chunk_sums(words).equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_what_the_definition_adds(dtype: torch.dtype) -> None:
    rows, held = random(40, 1100, scale=3.0), random(9, 1100, seed=1).to(dtype)
    tokens = torch.randint(-2, 12, (40,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found = {}
    for implementation in ("torch", "triton"):
        found[implementation] = held.clone()
        with using(implementation), Atomics() as atomics:
            ops.add_by_token(found[implementation], rows, tokens)
        assert atomics.found == []
    assert torch.equal(found["torch"], found["triton"])
    for token in range(9):
        total = torch.zeros(1100, device=DEVICE)
        for row in rows[tokens == token]:
            total += row.float()
        assert torch.equal(found["torch"][token], held[token] + total.bfloat16().to(dtype))
