"""What the compiler makes of the attention kernels for an H200, which is known without one."""

import pytest

from tests.support.sass import in_one_order, named, only_unpacks

pytestmark = pytest.mark.slow  # 24 kernels to compile

SCRIPT = """
import dataclasses
import torch
from fp8rl.numerics.kv import CODES
from fp8rl.numerics.kernels.products import tiles as heights
from fp8rl.numerics.kernels.attention.forward import attention, packed_attention, paged_attention
from fp8rl.numerics.kernels.trees import tree_attention
from fp8rl.numerics.ops import TokenTree
from tests.support.hopper import compiled_only

def tensor(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)

with compiled_only(loops=True) as found:
    for queries, keys, heads, key_heads in ((1024, 1024, 16, 2), (4096, 4096, 32, 4)):
        k, positions = tensor(2, keys, key_heads, 128), torch.arange(queries).expand(2, -1)
        out = attention(tensor(2, queries, heads, 128), k, k, positions, 0.1)
        if queries == 1024:
            out.sum().backward()
    k = tensor(2048, 2, 128)
    packed_attention(tensor(2048, 2, 128), k, k, torch.full((16,), 128), 0.1).sum().backward()
    each, all_tokens = torch.full((16,), 128), torch.zeros(2048).long()
    for longest in (640, 2048):
        tree = TokenTree(each, each, torch.zeros(16, longest).int(), *[all_tokens] * 3)
        out = tree_attention(tensor(2048, 16, 128), k, k, tree, 0.1)
    out.sum().backward()
    for tokens, sequences, heads, key_heads, longest in (
        (2048, 16, 16, 2, 1024), (8192, 16, 32, 4, 32768), (200, 2, 32, 4, 32768)
    ):
        cache, table = tensor(4096, key_heads, 128), torch.zeros(32, longest, dtype=torch.int32)
        count = torch.ones(sequences, dtype=torch.int64)
        paged_attention(tensor(tokens, heads, 128), cache, cache, table, count, count.int(), count, 0.1)
    heights.ALLOWED[heights.SHORT] = True
    for heads, key_heads in ((32, 4), (64, 4), (8, 8), (5, 1)):
        cache, table = tensor(4096, key_heads, 128), torch.zeros(32, 32768, dtype=torch.int32)
        count = torch.ones(32, dtype=torch.int64)
        paged_attention(tensor(32, heads, 128), cache, cache, table, count, count.int(), count, 0.1)
    whole, codes = len(found), tensor(4096, 1, 128).detach().to(CODES)
    paged_attention(tensor(32, heads, 128), codes, codes, table, count, count.int(), count, 0.1)
    found[whole:] = [dataclasses.replace(each, name="of codes") for each in found[whole:]]
"""


def test_products_run_on_the_tensor_core_and_tiles_fit(kernels):
    """227 KiB of shared memory, 255 registers. What does not fit into these is next to nothing, or, where a program
    merges chunks itself, waits outside the loops over the keys of a chunk."""
    merging, merged = named(kernels, "_merge_kernel"), []
    assert len(merging) == 5 and all(kernel["spilled"] <= 8 for kernel in merging)
    for kernel in kernels:
        if kernel in merging or kernel["name"] == "of codes":
            continue
        assert kernel["name"] in ("_forward_kernel", "_dq_kernel", "_dkv_kernel")
        assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in kernel["instructions"]
        assert not any(name.startswith("mma.sync") for name in kernel["instructions"])
        assert kernel["shared"] <= 227 * 1024 and not kernel["respilled"], kernel
        merged += [kernel["spilled"]] if kernel["spilled"] > 64 else []
    assert len(merged) == 4 and max(merged) <= 344  # contiguous, packed, a tree, and the prefill of 8,192 tokens


def test_every_variant_adds_up_in_one_order(kernels):
    """The loops over keys without a mask and with one: decode, prefill, contiguous, packed, a tree; gradients of query
    heads that share a key head, and that do not. Codes are unpacked, and then computed with as BF16 numbers are. A row
    is summed in the layout of the product: 8 warps, each with 16 whole rows, or 4 in tiles of 64 rows."""
    for kernel, warps in zip(named(kernels, "_forward_kernel"), [8] * 8 + [4] * 4, strict=True):
        (layout,) = kernel["sums"]
        wanted = ("nvidia_mma", f"warpsPerCTA = [{warps}, 1]", "instrShape = [16, 128, 16]")
        assert all(each in layout for each in wanted), layout
    for name, count, loops in (("_forward_kernel", 12, 2), ("_dq_kernel", 3, 2), ("_dkv_kernel", 3, 1)):
        assert len(variants := named(kernels, name)) == count
        assert len(found := in_one_order(variants)) == loops and all(sum(each.values()) > 100 for each in found)
    assert only_unpacks(named(kernels, "of codes")[0], named(kernels, "_forward_kernel")[0])


def test_decode_of_64_rows_spills_nothing_and_fills_the_gpu(kernels):
    """32 sequences and up to 32,768 keys. Query heads share a key head by eights, by sixteens, not at all, by fives;
    an H200 has 132 SMs."""
    decode = named(kernels, "_forward_kernel")[-4:]
    assert [kernel["spilled"] for kernel in decode] == [0] * 4
    assert [kernel["blocks"] for kernel in decode] == [36 * 4 * 4, 40 * 4 * 4, 32 * 8 * 3, 34 * 16]


def test_the_next_step_is_copied_while_a_step_is_computed(kernels):
    """A step over 128 keys waits for its own keys and values, and leaves those of the next step under way; gradients
    likewise, of which those of the keys copy queries, their gradients and three numbers of each. In decode, by Little's
    law, 3.35 TB/s over 132 SMs at a latency of a microsecond, of which 0.6 to 1 is usual, take 25 KB of each; a block
    copies 64 KiB in a step."""
    groups = {"_forward_kernel": 2, "_dq_kernel": 2, "_dkv_kernel": 5}
    loops = [(kernel, kernel["under_way"]) for kernel in kernels if kernel["name"] in groups]
    assert len(loops) == 18 and all(set(found) == {groups[kernel["name"]]} for kernel, found in loops)
    for kernel in named(kernels, "_forward_kernel")[-4:]:
        assert min(kernel["brought"]) * 128 > 2 * 3.35e12 / 132 * 1e-6
