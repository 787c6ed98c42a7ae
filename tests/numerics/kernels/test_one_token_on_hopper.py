"""A decode step of one sequence, one head and one expert compiles: Triton makes constants of arguments that are 1, its
interpreter does not."""

import pytest

from tests.support.elsewhere import compiled_elsewhere

pytestmark = pytest.mark.slow  # two dozen kernels to compile

SCRIPT = """
import torch
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.numerics.quantize import QuantizedTensor, scale_shape
from fp8rl.numerics.spec import QuantSpec
from tests.support.hopper import compiled_only

spec = QuantSpec.preset("fp8_block_pow2")

def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)

def weight(*shape):
    scale_inv = torch.zeros(scale_shape(shape, spec.weight))
    codes = QuantizedTensor(torch.zeros(shape, dtype=torch.float8_e4m3fn), scale_inv, spec.weight)
    return ExpertWeights(codes.data, ops.weight_operand(codes))

with compiled_only() as found, using("triton"), torch.no_grad():
    one = torch.ones(1, dtype=torch.int64)
    x, norm, wide = tensor(1, 128), tensor(128), weight(128, 128)
    ops.rms_norm(x, norm, 1e-6)
    ops.add_rms_norm(x, x, norm, 1e-6)
    ops.fp8_linear(x, wide.weights, wide.operand, spec)
    deep = weight(128, 256)
    ops.fp8_linear(tensor(1, 256), deep.weights, deep.operand, spec, k_splits=2)
    ops.norm_fp8_linear(x, norm, 1e-6, wide.weights, wide.operand, spec)
    ops.rope(tensor(1, 1, 1, 128), one[None], 1e6)
    cache, table = tensor(4096, 1, 128), tensor(1, 4096, dtype=torch.int32)
    ops.paged_attention(tensor(1, 1, 128), cache, cache, table, one, one, one, 0.1)
    probs, chosen = ops.route(ops.linear(x, tensor(1, 128)), 1, True)
    order, counts = tensor(1, dtype=torch.int64), tensor(1, dtype=torch.int64)
    outputs = ops.experts(x[order], counts, weight(1, 2 * 128, 128), weight(1, 128, 128), spec, "bf16")
    ops.combine(outputs, probs, order, x.dtype)
    logits = ops.linear(x, tensor(256, 128))
    ops.token_logprobs(logits, one, torch.ones(1))
    ops.draw(logits, torch.ones(1), one, one)
"""


def test_a_decode_step_of_one_sequence_compiles():
    assert {kernel["name"] for kernel in compiled_elsewhere(SCRIPT)} == {
        "_forward_kernel",
        "_combine_kernel",
        "_merge_kernel",
        "_rows_kernel",
        "_product_kernel",
        "_kernel",
        "_route_kernel",
        "_tiles_kernel",
        "_draw_kernel",
    }
