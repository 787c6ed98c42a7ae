"""What a decode step of Qwen3-30B-A3B launches on a GPU, and how many kernels an engine compiles for batches of all
sizes, counted on the meta device."""

from typing import Any

import pytest

from tests.support.elsewhere import found_elsewhere

pytestmark = pytest.mark.slow

OF_A_LAYER, BESIDE_LAYERS = 14, 7
"""Launches, an op of torch counted once."""
OF_64_ANSWERS = {"norm._forward_kernel": 2, "gemm._product_kernel": 5} | dict.fromkeys(
    [f"{each}_kernel" for each in "rope._heads forward._forward chunks._merge quantize._rows router._route".split()], 1
)
OF_64_ANSWERS |= {f"{each}_kernel": 1 for each in ("pairs._gather", "gates._swiglu", "pairs._combine")}
"""Of a layer in FP8, whose answers have up to 4,096 tokens. With 256 answers no chunks are merged."""
VARIANTS = 36
"""Compiled kernels: 15 of attention, for 9 powers of two of sequences, 2 heights of tiles, and chunks of keys spread
over programs or not; 7 of products, for operands, widths and heights of tiles, grouped or not; at most 3 of any
other."""

SCRIPT = """
import dataclasses, functools, json
import torch
from lab.bench.gpu.exactness import HEAD, Pages, engine_forward, make_layer, make_norm
from lab.bench.gpu.measure import Sizes, random
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.kernels.products import tiles as heights
from fp8rl.numerics.spec import QuantSpec
from tests.support.launches import launches

META, CONTEXT = torch.device("meta"), 4096
SHAPE = dataclasses.replace(Sizes.real().stack, vocab=151_936)

def whole(*shape, dtype=torch.int64):
    return torch.empty(*shape, dtype=dtype, device=META)

def step(layers, tokens, sequences):
    caches = [torch.empty(2, 1 << 16, SHAPE.kv_heads, HEAD, dtype=torch.bfloat16, device=META) for _ in layers]
    new = None if tokens == sequences else whole(sequences, dtype=torch.int32)
    pages = Pages(whole(300, CONTEXT, dtype=torch.int32), whole(sequences), new, whole(sequences), whole(tokens))
    x = engine_forward(head[whole(tokens)], whole(tokens), layers, caches, pages, norm, SHAPE)
    logits, temperatures = ops.linear(x[:sequences], head), torch.empty(sequences, device=META)
    drawn = ops.draw(logits, temperatures, whole(sequences), whole(sequences))
    ops.token_logprobs(logits, drawn, temperatures)

def counted(layers, *batches):
    with launches() as found:
        for tokens, sequences in batches:
            step(layers, tokens, sequences)
    return found

heights.ALLOWED[heights.SHORT] = True
with using("triton"), torch.no_grad():
    with launches():
        layer, norm = make_layer(SHAPE, META), make_norm(SHAPE.hidden, META)
        head = random(SHAPE.vocab, SHAPE.hidden, device=META)
    counted([layer], (1, 1))  # what is made once
    one, two = counted([layer], (256, 256)), counted([layer] * 2, (256, 256))
    few = [counted([layer] * layers, (64, 64)) for layers in (1, 2)]
    decoded = ((rows, rows) for rows in range(1, 257))
    prefilled = ((tokens, sequences) for tokens in (17, 100, 128, 1000, 8191, 8192) for sequences in (1, 2, 16))
    every = counted([layer], *decoded, *prefilled)
q = torch.empty(1000, 16, HEAD, dtype=torch.bfloat16, device=META, requires_grad=True)
k = torch.empty(1000, 2, HEAD, dtype=torch.bfloat16, device=META, requires_grad=True)
with using("triton"), launches() as packed:  # a tensor on meta cannot be read, as a wait for the device would
    ops.packed_attention(q, k, k, whole(9), 0.1).sum().backward()
every_token = whole(1000)
tree = ops.TokenTree(whole(9), whole(9), whole(9, 300).int(), every_token, every_token, every_token)
with using("triton"), launches() as shared:
    ops.tree_attention(q, k, k, tree, 0.1).sum().backward()
settings = torch.empty(256, device=META), whole(256), torch.empty(256, device=META)
with using("triton"), launches() as cut:
    logits = whole(256, SHAPE.vocab, dtype=torch.bfloat16)
    ops.narrowed(logits, ops.truncation_floors(logits, settings[0], *settings))
of_a_layer = two.total - one.total
variants = {name: len(keys) for name, keys in every.variants.items()}
beside, names = one.total - of_a_layer, one.torch | one.kernels
found = {"layer": of_a_layer, "beside": beside, "names": names, "variants": variants, "packed": packed.kernels}
found["tree"] = shared.kernels
found["of 64 answers"] = (few[1].kernels - few[0].kernels) + (few[1].torch - few[0].torch)
found["cut"] = {"kernels": cut.kernels, "torch": cut.torch}

def adapter(n, k, parts=1, experts=()):
    return ops.LowRank(half(*experts, parts * 8, k), half(*experts, n, parts * 8), 2.0, parts)

def total(call, *arguments):
    with launches() as counted:
        call(*arguments)
    return counted.total

def experts(*adapters):
    return total(ops.experts, x, whole(8), *map(ops.ExpertWeights, stacks, operands, adapters), SPEC)

SPEC, half = QuantSpec.preset("fp8_block_pow2"), functools.partial(whole, dtype=torch.bfloat16)
with using("triton"), torch.no_grad():
    x, w, stacks = half(256, 2048), half(1536, 2048), (half(8, 1536, 2048), half(8, 2048, 768))
    with launches():
        operand = ops.trained_operand(w, SPEC.weight)
        operands = [ops.trained_operand(stack, SPEC.weight) for stack in stacks]
    adapted = total(lambda: ops.fp8_linear(x, w, operand, SPEC, plus=ops.low_rank_of(x, adapter(1536, 2048, 3))))
    plain, without = total(ops.fp8_linear, x, w, operand, SPEC), experts(None, None)
    of_each = experts(adapter(1536, 2048, 2, (8,)), adapter(2048, 768, 1, (8,)))
    of_all = experts(adapter(1536, 2048, 2), adapter(2048, 768))
found["adapted"] = {"product": adapted - plain, "of each": of_each - without, "of all": of_all - without}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    return found_elsewhere(SCRIPT)


def test_a_decode_step_keeps_to_its_launches(found: Any) -> None:
    assert found["layer"] <= OF_A_LAYER and found["beside"] <= BESIDE_LAYERS, found
    assert found["of 64 answers"] == OF_64_ANSWERS


def test_batches_of_all_sizes_are_served_by_few_compiled_kernels(found: Any) -> None:
    assert sum(found["variants"].values()) <= VARIANTS, found["variants"]
    by_size = {"forward._forward_kernel", "gemm._product_kernel"}
    assert all(count <= 3 for name, count in found["variants"].items() if name not in by_size), found["variants"]


def test_attention_of_rows_end_to_end_and_of_trees_never_waits_for_the_device(found: Any) -> None:
    kernels = {"forward._forward_kernel": 1, "backward._dq_kernel": 1, "backward._dkv_kernel": 1}
    assert found["packed"] == found["tree"] == kernels


def test_top_p_top_k_and_min_p_add_few_launches_to_a_decode_step(found: Any) -> None:
    assert found["cut"]["kernels"] == {"draw._floors_kernel": 1}
    assert sum(found["cut"]["torch"].values()) <= 2, found["cut"]


def test_an_adapter_costs_a_product_two_launches_and_experts_few_more(found: Any) -> None:
    """Its own two; experts add the tiles of each, and SwiGLU is not quantized where it is computed."""
    assert found["adapted"]["product"] == 2 and found["adapted"]["of each"] <= 14, found["adapted"]
    assert found["adapted"]["of all"] <= 8, found["adapted"]
