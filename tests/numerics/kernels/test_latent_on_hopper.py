"""What the compiler makes of the kernels of latent attention for an H200, in DeepSeek-V3's sizes."""

import pytest

from tests.support.hopper import compiled_elsewhere

pytestmark = pytest.mark.slow  # nine kernels to compile

SCRIPT = """
import torch
from numerics.kernels.attention.latent import latent_attention, paged_latent_attention
from numerics.kernels.products.heads import head_linear
from numerics.kernels.products.linear import weight_operand
from numerics.quantize import quantize
from numerics.spec import QuantSpec
from tests.support.hopper import compiled_only

def tensor(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)

weight = tensor(16 * 256, 512)
operand = weight_operand(quantize(weight, QuantSpec.preset("fp8_block_pow2").weight))
with compiled_only() as found:
    for heads, sequences in ((16, 32), (64, 32), (128, 16)):
        table, count = torch.zeros(32, 32768, dtype=torch.int32), torch.ones(sequences, dtype=torch.int64)
        q, cache = tensor(sequences, heads, 576), tensor(4096, 576)
        paged_latent_attention(q, cache, table, count, count.int(), count, 512, 0.1)
    latent_attention(tensor(2, 4096, 16, 576), tensor(2, 4096, 576), torch.arange(4096).expand(2, -1), 512, 0.1)
    for held in (None, operand):
        head_linear(tensor(300, 16, 512), weight, held, 128, 128)
        head_linear(tensor(300, 16, 192)[..., :128], weight, held, 0, 128, True)
"""


@pytest.fixture(scope="module")
def kernels():
    return compiled_elsewhere(SCRIPT)


def test_decode_spills_next_to_nothing_and_runs_on_the_tensor_core(kernels):
    """Chunks of up to 32,768 keys are spread over programs. Up to 64 heads are one tile of rows, by which a sequence's
    rows of the cache are read once: 576 numbers a token and layer, as keys and as values."""
    attention = [kernel for kernel in kernels if kernel["name"] == "_forward_kernel"]
    *decode, prefill = attention
    assert len(decode) == 3 and all(kernel["spilled"] <= 32 and not kernel["respilled"] for kernel in decode)
    assert not prefill["respilled"]  # it merges chunks itself, and keeps the sums of those before outside the loops
    for kernel in attention:
        assert kernel["shared"] <= 227 * 1024
        assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in kernel["instructions"]
    assert [kernel["sums"] for kernel in attention] == [attention[0]["sums"]] * 4, "rows are summed in one order"


def test_products_of_heads_and_merges_spill_nothing(kernels):
    others = [kernel for kernel in kernels if kernel["name"] != "_forward_kernel"]
    assert {kernel["name"] for kernel in others} == {"_merge_kernel", "_kernel"}
    assert all(kernel["spilled"] <= 32 for kernel in others)
