"""Each shared op against an independent float64 computation, its gradient, and itself in other batches."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fp8rl.numerics import ops, probe
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.numerics.ops.rope import Llama3, frequencies
from fp8rl.numerics.probe import row_variant_ops
from fp8rl.numerics.spec import QuantSpec

SPEC = QuantSpec.preset("fp8_block_pow2")


def random(*shape, seed=0, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def one_rounding(found, exact):
    """BF16 nearest to within the FP32 arithmetic before it."""
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


def gradients(op, oracle, *inputs):
    """Gradients of `op` in FP32 against those of `oracle` in float64."""
    ours = [x.float().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, expected = op(*ours), oracle(*theirs)
    dy = random(*out.shape, seed=9, dtype=torch.float32)
    out.backward(dy)
    expected.backward(dy.double())
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5 * max(b.grad.abs().max().item(), 1.0))


def rms_norm64(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_rms_norm():
    x, weight = random(40, 256), random(256, seed=1) + 1
    one_rounding(ops.rms_norm(x, weight, 1e-6), rms_norm64(x.double(), weight.double()))
    gradients(lambda a, w: ops.rms_norm(a, w, 1e-6), rms_norm64, x, weight)


def test_add_rms_norm_rounds_the_sum_before_it_normalises():
    x, residual, weight = random(40, 256), random(40, 256, seed=2, scale=30), random(256, seed=1)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, (x.double() + residual.double()).bfloat16())
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_bias_is_added_to_the_rounded_product(dtype):
    product, bias = random(3, 70, 96, dtype=dtype), random(96, seed=1, dtype=dtype)
    one_rounding(ops.add_bias(product, bias), product.double() + bias.double())
    gradients(ops.add_bias, lambda y, b: y + b, product.bfloat16(), bias.bfloat16())
    assert ops.add_bias(product, None) is product
    for rows in (1, 17):
        assert torch.equal(ops.add_bias(product[0, :rows], bias), ops.add_bias(product, bias)[0, :rows])


def rope64(x, positions, frequency=None):
    if frequency is None:
        half = x.shape[-1] // 2
        frequency = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[..., None, None].double() * frequency
    first, second = x.chunk(2, -1)
    rotated = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(rotated, -1)


def test_rope():
    x = random(2, 5, 3, 128)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 500, 1023, 1024, 9000]])
    one_rounding(ops.rope(x, positions, 1e4), rope64(x.double(), positions))
    gradients(lambda a: ops.rope(a, positions, 1e4), lambda a: rope64(a, positions), x)


def test_rope_of_the_first_channels():
    x, positions = random(1, 5, 3, 128), torch.arange(5)[None]
    rotated = ops.rope(x, positions, 1e4, 64)
    assert torch.equal(rotated[..., :64], ops.rope(x[..., :64], positions, 1e4))
    assert torch.equal(rotated[..., 64:], x[..., 64:])
    gradients(
        lambda a: ops.rope(a, positions, 1e4, 64),
        lambda a: torch.cat((rope64(a[..., :64], positions), a[..., 64:]), -1), x,
    )  # fmt: skip


def test_swiglu():
    x = random(30, 512, scale=3)

    def oracle(a):
        gate, up = a.chunk(2, -1)
        return F.silu(gate) * up

    one_rounding(ops.swiglu(x), oracle(x.double()))
    gradients(ops.swiglu, oracle, x)


def attention64(q, k, v, scale=0.1):
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("length", (1, 9, 128, 129, 300))
def test_attention(length):
    q, k, v = random(2, length, 4, 64), random(2, length, 2, 64, seed=1), random(2, length, 2, 64, seed=2)
    positions = torch.arange(length).expand(2, -1)
    one_rounding(ops.attention(q, k, v, positions, 0.1), attention64(q.double(), k.double(), v.double()))
    gradients(lambda *x: ops.attention(*x, positions, 0.1), attention64, q, k, v)


def moe(x, router, w13, w2, top_k, spec=None):
    """An MoE layer put together from the shared ops, as the engine does it."""
    probs, chosen = ops.route(ops.linear(x, router), top_k, True)
    order, counts = ops.group_by_expert(chosen, len(w13.weights))
    outputs = ops.experts(x[order // top_k], counts, w13, w2, spec)
    return ops.combine(outputs, probs, order, x.dtype), chosen, probs


def weights(experts=8, hidden=256, width=128):
    w13 = [random(2 * width, hidden, seed=10 + e, scale=0.06) for e in range(experts)]
    w2 = [random(hidden, width, seed=50 + e, scale=0.08) for e in range(experts)]
    return random(experts, hidden, seed=3, scale=0.1), torch.stack(w13), torch.stack(w2)


@pytest.mark.parametrize("top_k", (1, 2, 5))
def test_experts_and_combine(top_k):
    router, w13, w2 = weights()
    x = random(33, 256)
    out, chosen, probs = moe(x, router, ExpertWeights(w13), ExpertWeights(w2), top_k)
    for token in range(33):
        exact = torch.zeros(256, dtype=torch.float64)
        for expert, prob in zip(chosen[token].tolist(), probs[token].double()):
            gate, up = (w13[expert].double() @ x[token].double()).bfloat16().double().chunk(2)
            inner = (F.silu(gate) * up).bfloat16().double()
            exact += prob * (w2[expert].double() @ inner).bfloat16().double()
        assert torch.allclose(out[token].double(), exact, rtol=2**-6, atol=2**-8)


@pytest.mark.slow
def test_this_machine_is_row_invariant_and_the_probe_sees_an_op_that_is_not(monkeypatch):
    assert row_variant_ops() == []

    def normalised_over_the_batch(x, weight, eps):
        return (x.float() / x.float().std()).to(x.dtype)

    def not_rounded_between(x, residual, weight, eps):
        total = x.float() + residual.float()
        return ops.rms_norm(total, weight, eps).to(x.dtype), total.to(x.dtype)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "add_rms_norm", not_rounded_between)
        # Beside the norm, what goes on from its result in one launch is compared with.
        assert row_variant_ops() == ["add_rms_norm", "norm_rows", "rows_linear", "routed_experts"]

    def of_a_user(random, count):
        x = random(count, 8)
        return {"its own": lambda n: x[:n] - x[:n].mean(0), "another": lambda n: x[:n] * 2}

    def over_the_branch_before(q, k, v, tree, scale):
        return ops.packed_attention(q, k, v, torch.tensor([len(q)]), scale)

    monkeypatch.setattr(ops, "rms_norm", normalised_over_the_batch)
    monkeypatch.setattr(ops, "draw", lambda logits, *_: logits.argmax(-1))
    monkeypatch.setattr(probe, "_ATTENTION", replace(probe._ATTENTION, tree=over_the_branch_before))
    monkeypatch.setattr(dispatch, "USERS_PROBES", [dispatch.Probes(rows=of_a_user)])
    found = row_variant_ops()
    assert {"rms_norm", "its own", "attention over 384 keys"} <= set(found) and "another" not in found
    assert "draw, whose tokens differ from its definition's" in found


SCALINGS = {
    "8b": (5e5, 128, Llama3(factor=8.0, original=8192, low=1.0, high=4.0)),
    "1b": (5e5, 64, Llama3(factor=32.0, original=8192, low=1.0, high=4.0)),
    "other": (1e4, 64, Llama3(factor=4.0, original=256, low=1.5, high=3.0)),
}


def of_transformers(theta, dim, scaling):
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": scaling.factor}
    rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    rope |= {"original_max_position_embeddings": scaling.original}
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=1 << 17)
    config.rope_parameters = rope
    return ROPE_INIT_FUNCTIONS["llama3"](config)[0]


def of_sglang(theta, dim, scaling):
    variants = pytest.importorskip("sglang.srt.layers.rotary_embedding.rope_variant")
    module = variants.Llama3RotaryEmbedding.__new__(variants.Llama3RotaryEmbedding)
    nn.Module.__init__(module)
    module.rotary_dim, module.orig_max_position, module._force_native = dim, scaling.original, False
    module.scaling_factor, module.low_freq_factor, module.high_freq_factor = scaling.factor, scaling.low, scaling.high
    return module._compute_inv_freq(theta)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theirs", (of_transformers, of_sglang))
def test_frequencies_of_llama_3_are_those_of_other_implementations(monkeypatch, theirs, name):
    """To the bit, in FP32, where their arithmetic is FP64 as ours; in FP32 they are off by its roundings."""
    ours = frequencies(*SCALINGS[name])
    rounded = theirs(*SCALINGS[name])
    assert rounded.dtype == torch.float32 and ((rounded - ours) / ours).abs().max() < 4e-7
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)  # the name by which both ask for their dtype
        exact = theirs(*SCALINGS[name])
    assert exact.dtype == torch.float64 and torch.equal(exact.float(), ours.float())


def test_a_scaled_rotation_turns_by_its_frequencies():
    theta, dim, scaling = SCALINGS["other"]
    x, positions = torch.randn(1, 3, 2, dim).bfloat16(), torch.tensor([[0, 300, 2000]])
    found = ops.rope(x, positions, theta, None, scaling)
    one_rounding(found, rope64(x.double(), positions, frequencies(theta, dim, scaling)))
    assert not torch.equal(found[:, 1:], ops.rope(x, positions, theta)[:, 1:])
