"""What the compiler makes of the kernels that are bound by memory for an H200, which is known without one."""

import pytest

from tests.support.elsewhere import compiled_elsewhere

pytestmark = pytest.mark.slow  # 30 kernels to compile

SCRIPT = """
import torch
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.digest import CHUNK
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.kernels import digest, draw, gates, logprobs, norm, quantize, rope, router, trees
from fp8rl.numerics.kernels.products import pairs
from fp8rl.numerics.kernels.products.operands import backward_operands
from fp8rl.numerics.kernels.products.tiles import make_tiles
from fp8rl.numerics.ops import ExpertWeights, HeadNorms, NewSlots
from fp8rl.numerics.quantize import quantize as definition
from fp8rl.numerics.spec import QuantSpec
from tests.support.hopper import compiled_only

def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)

x, spec, run = tensor(4096, 2048), TensorSpec(), QuantSpec.preset("fp8_block_pow2")
with compiled_only() as found:
    quantize.quantize_rows(x, spec)
    tiles = make_tiles(torch.zeros(8).long(), 4096)
    wide, inverse_rms, token_of = tensor(4096, 1536), torch.zeros(4096), torch.zeros(4096, dtype=torch.int64)
    backward_operands(x, x, run.override({"activation": {"scale": "fp32"}, "gradient": {"format": "e5m2"}}))
    backward_operands(x, x, run, norm=(x[0], inverse_rms))
    backward_operands(x, wide, run, tiles, gated=True)
    backward_operands(wide[:, :768], x, run, tiles, token_of=token_of, gate_up=wide)
    quantize.quantize_blocks(x, TensorSpec(granularity="block", fixed=224.0))
    quantize.quantize_both_ways(x.expand(2, -1, -1), run.weight)
    norm.add_rms_norm(x, x, x[0], 1e-6)[0].sum().backward()
    norm.rms_norm_forward(tensor(4096 * 32, 128), x[0, :128], 1e-6)
    wide = tensor(512, 7168)
    norm.add_rms_norm(wide, wide, tensor(7168), 1e-6)[0].sum().backward()
    norm.rms_norm_quantize(x, x[0], 1e-6, TensorSpec(fixed=224.0))
    gates.swiglu_backward(x, gates.swiglu_forward(x))
    gates.swiglu_quantize(x, spec)
    rows = tensor(1024 * 8, 2048)
    quantized = norm.norm_rows(x.detach(), x.detach(), x[0].detach(), 1e-6, spec)[2]
    q, k, v = tensor(64, 40, 128).detach().split((32, 4, 4), 1)
    cache = NewSlots(*torch.zeros(2, 1000, 4, 128, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64), v)
    rope.rope_heads(q, k, torch.zeros(64).long(), 1e6, norms=HeadNorms(v[0, 0], v[0, 0], 1e-6), cache=cache)
    pairs.gather_by_expert(quantized, torch.zeros(64, 8).int(), 128, 64)
    pairs.gather_by_expert(quantized, torch.zeros(4096, 8).int(), 128, 128)
    probs = tensor(1024, 8, dtype=torch.float32)
    pairs.combine(rows, probs, torch.arange(1024 * 8), torch.bfloat16).sum().backward()
    digest.chunk_sums([torch.empty(1, 8 * CHUNK, dtype=torch.int32, device="meta")])
    trees.add_by_token(torch.zeros(1000, 2048), x.detach(), torch.zeros(4096).long())
    numbers = torch.zeros(64, dtype=torch.int64)
    logprobs.token_logprobs(tensor(64, 151936), numbers, 1.0)[0].sum().backward()
    router.route(tensor(4096, 128), 8, True)
    ones = tensor(64, dtype=torch.float32)
    draw.draw(tensor(64, 151936), ones, numbers, numbers)
    draw.truncation_floors(tensor(64, 151936), ones, ones, numbers, ones)
"""
ONE = """
def weight(*shape):
    held = definition(tensor(*shape).detach(), run.weight)
    return ExpertWeights(held.data, ops.weight_operand(held))

with compiled_only() as found, using("triton"), torch.no_grad():
    one = torch.ones(1, dtype=torch.int64)
    x, norm, wide = tensor(1, 128), tensor(128), weight(128, 128)
    ops.rms_norm(x, norm, 1e-6)
    ops.add_rms_norm(x, x, norm, 1e-6)
    ops.fp8_linear(x, wide.weights, wide.operand, run)
    deep = weight(128, 256)
    ops.fp8_linear(tensor(1, 256), deep.weights, deep.operand, run, k_splits=2)
    ops.norm_fp8_linear(x, norm, 1e-6, wide.weights, wide.operand, run)
    ops.rope(tensor(1, 1, 1, 128), one[None], 1e6)
    cache, table = tensor(4096, 1, 128), torch.zeros(1, 4096, dtype=torch.int32)
    ops.paged_attention(tensor(1, 1, 128), cache, cache, table, one, one, one, 0.1)
    probs, chosen = ops.route(ops.linear(x, tensor(1, 128)), 1, True)
    order, counts = torch.zeros(2, 1, dtype=torch.int64)
    outputs = ops.experts(x[order], counts, weight(1, 2 * 128, 128), weight(1, 128, 128), run, "bf16")
    ops.combine(outputs, probs, order, x.dtype)
    logits = ops.linear(x, tensor(256, 128))
    ops.token_logprobs(logits, one, torch.ones(1))
    ops.draw(logits, torch.ones(1), one, one)
"""


def test_a_decode_step_of_one_sequence_one_head_and_one_expert_compiles():
    """Triton makes constants of arguments that are 1, its interpreter does not."""
    names = "blocks forward merge rows product route tiles draw combine swiglu heads".split()
    found = {kernel["name"] for kernel in compiled_elsewhere(SCRIPT.partition("with compiled_only")[0] + ONE)}
    assert found == {f"_{name}_kernel" for name in names}


def test_everything_stays_in_registers_and_shared_memory(kernels):
    """With more than 64 registers of each of 512 threads one program that quantizes operands would be on an SM, and
    nothing to compute while it waits. What SwiGLU's gradient takes does not fit."""
    assert len(kernels) == 30
    for kernel in kernels:
        assert kernel["shared"] <= 64 * 1024 and kernel["spilled"] <= 64, kernel
    operands = [kernel for kernel in kernels if kernel["name"] == "_operands_kernel"]
    assert [kernel["registers"] <= 64 for kernel in operands] == [True] * 4, operands
    assert not any(kernel["spilled"] for kernel in operands[:-1]), operands


def test_codes_are_cast_by_the_instruction_that_saturates_and_few_kernels_divide(kernels):
    """Of the kernels that quantize, the one that writes FP32 scales too. Log-probabilities divide once for the
    temperature, and once for the entropy, and not for each logit."""
    casting = [kernel for kernel in kernels if any("satfinite" in name for name in kernel["instructions"])]
    assert len(casting) == 10
    formats = {name for kernel in casting for name in kernel["instructions"] if "satfinite" in name}
    assert formats == {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"}
    assert [kernel["name"] for kernel in casting if kernel["divisions"]] == ["_operands_kernel"]
    forward, backward = kernels[-5:-3]
    assert (forward["divisions"], backward["divisions"]) == (2, 1)
