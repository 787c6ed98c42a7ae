"""What the compiler makes of the kernels of latent attention for an H200, in DeepSeek-V3's sizes."""

import pytest

from tests.support.sass import in_one_order, named, only_unpacks

pytestmark = pytest.mark.slow  # 26 kernels to compile

SCRIPT = """
import dataclasses
import torch
from fp8rl.numerics.kv import CODES
from fp8rl.numerics.kernels.attention.latent import (
    latent_attention, packed_latent_attention, paged_latent_attention, tree_latent_attention
)
from fp8rl.numerics.kernels.products.heads import head_product
from fp8rl.numerics.kernels.products.linear import weight_operand
from fp8rl.numerics.ops import TokenTree
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from tests.support.hopper import compiled_only

def tensor(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)

weight = tensor(16 * 256, 512)
operand = weight_operand(quantize(weight.detach(), QuantSpec.preset("fp8_block_pow2").weight))
with compiled_only(loops=True) as found:
    for heads, sequences in ((16, 32), (64, 32), (128, 16)):
        table, count = torch.zeros(32, 32768, dtype=torch.int32), torch.ones(sequences, dtype=torch.int64)
        q, cache = tensor(sequences, heads, 576), tensor(4096, 576)
        paged_latent_attention(q, cache, table, count, count.int(), count, 512, 0.1)
    q, rows = tensor(2, 4096, 128, 576), tensor(2, 4096, 576)
    latent_attention(q, rows, torch.arange(4096).expand(2, -1), 512, 0.1).sum().backward()
    q, rows = tensor(2048, 20, 576), tensor(2048, 576)
    each, table, every = torch.full((16,), 128), torch.zeros(16, 2048).int(), torch.zeros(2048).long()
    packed_latent_attention(q, rows, each, 512, 0.1).sum().backward()
    tree_latent_attention(q, rows, TokenTree(each, each, table, every, every, every), 512, 0.1).sum().backward()
    for held in (None, operand):
        head_product(tensor(300, 16, 512), weight, held, 128, 128)
        head_product(tensor(300, 16, 192)[..., :128], weight, held, 0, 128, True)
        head_product(tensor(300, 16, 192)[..., :128], weight, held, 0, 128, True, tensor(300, 16, 512))
    table, whole = torch.zeros(32, 32768, dtype=torch.int32), len(found)
    paged_latent_attention(
        tensor(sequences, 16, 576), cache.detach().to(CODES), table, count, count.int(), count, 512, 0.1
    )
    found[whole:] = [dataclasses.replace(each, name="of codes") for each in found[whole:]]
"""


def test_decode_spills_next_to_nothing_and_runs_on_the_tensor_core(kernels):
    """Chunks of up to 32,768 keys are spread over programs."""
    attention, others = named(kernels, "_forward_kernel"), named(kernels, "_kernel") + named(kernels, "_merge_kernel")
    assert len(others) == 9 and all(kernel["spilled"] <= 32 for kernel in others)
    decode, whole = attention[:3], attention[3:]
    assert len(whole) == 3 and all(kernel["spilled"] <= 32 for kernel in decode)
    for kernel in attention:  # those of `whole` merge chunks, and keep the sums of those before outside the loops
        assert kernel["shared"] <= 227 * 1024 and not kernel["respilled"]
        assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in kernel["instructions"]
    assert [kernel["sums"] for kernel in attention] == [attention[0]["sums"]] * 6, "rows are summed in one order"


def test_every_variant_adds_up_in_one_order(kernels):
    """The loops over keys without a mask and with one: decode of 16, 64 and 128 heads, contiguous, packed, a tree; and
    their gradients. Codes are unpacked, and then computed with as BF16 numbers are."""
    for name, count, loops in (("_forward_kernel", 6, 2), ("_dq_kernel", 3, 1), ("_dk_kernel", 3, 1)):
        assert len(variants := named(kernels, name)) == count
        assert len(found := in_one_order(variants)) == loops and all(sum(each.values()) > 50 for each in found)
    assert only_unpacks(named(kernels, "of codes")[0], named(kernels, "_forward_kernel")[0])


def test_the_next_step_is_copied_once_while_a_step_is_computed(kernels):
    """As in attention of heads: keys and their tails are two groups of copies, the operands of the rows' gradient
    five. A step over 32 keys brings 576 numbers of 2 bytes for each, to 256 threads."""
    for kernel in named(kernels, "_forward_kernel"):
        assert kernel["brought"] and set(kernel["brought"]) == {32 * 576 * 2 // 256}
    groups = {"_forward_kernel": 2, "_dq_kernel": 2, "_dk_kernel": 5}
    loops = [(kernel, kernel["under_way"]) for kernel in kernels if kernel["name"] in groups]
    assert len(loops) == 12 and all(set(found) == {groups[kernel["name"]]} for kernel, found in loops)


def test_gradients_spill_next_to_nothing_and_run_on_the_tensor_core(kernels):
    """A step of the queries' gradient brings 16 keys; one of the rows' 16 queries, of 576 numbers, the gradients of
    their results, of 512 (and 64 zeros), and a position, two numbers of four bytes for some threads."""
    queries, rows = named(kernels, "_dq_kernel"), named(kernels, "_dk_kernel")
    assert len(queries) == len(rows) == len(named(kernels, "_delta_kernel")) == 3
    for kernel in queries + rows + named(kernels, "_delta_kernel"):
        assert kernel["spilled"] <= 32 and not kernel["respilled"] and kernel["shared"] <= 227 * 1024, kernel
    for kernel in queries + rows:
        assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in kernel["instructions"]
    assert all(kernel["brought"] == [16 * 576 * 2 // 256] for kernel in queries)
    assert all(kernel["brought"] == [2 * 16 * 576 * 2 // 256 + 16] for kernel in rows)
