"""What an engine says that it holds: every tensor under its name in the checkpoint, the cache of its pool, and states
of linear attention in SGLang's slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl.numerics.core.memory import Holding
from fp8rl.rollout.engine.plugin.state import inventory
from fp8rl.rollout.engine.plugin.tokens import Paged
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from tests.support.holdings import total_bytes
from tests.support.served_model import DEFINITION, SPEC, build, hf_tensors_served

SERVED = hf_tensors_served(0)


def held(dtype: torch.dtype, **buffers: Any) -> tuple[Holding, ...]:
    pool = SimpleNamespace(dtype=dtype, **buffers)
    return inventory(ServedWeights(SPEC.weight, build(SERVED), DEFINITION, "0"), SimpleNamespace(token_to_kv_pool=pool))


def test_weights_have_the_names_and_bytes_of_the_checkpoint_and_what_products_take_is_counted_once() -> None:
    everything = held(torch.bfloat16)
    found = {each.name: each for each in everything if each.kind in ("weights", "scales")}
    assert found.keys() == SERVED.keys()
    for name, tensor in SERVED.items():
        assert (found[name].shape, found[name].bytes) == (tuple(tensor.shape), tensor.nbytes), name
        assert found[name].kind == ("scales" if name.endswith("_scale_inv") else "weights")
    assert {each.format for each in found.values() if each.kind == "scales"} == {"fp32"}
    codes = sum(each.bytes for each in everything if each.format == "e4m3")
    assert codes > 0 and total_bytes(everything)["derived"] == 2 * codes  # in BF16


@pytest.mark.parametrize(
    ("dtype", "stored", "form"), [(torch.bfloat16, torch.bfloat16, "bf16"), (torch.float8_e4m3fn, torch.uint8, "e4m3")]
)
def test_the_cache_is_in_the_format_of_its_pool(dtype: torch.dtype, stored: torch.dtype, form: str) -> None:
    """SGLang stores FP8 as bytes."""
    buffers = [torch.zeros(9, 2, 128, dtype=stored) for _ in range(2)]
    found = [each for each in held(dtype, k_buffer=buffers, v_buffer=buffers) if each.kind == "kv_cache"]
    assert [each.name for each in found] == [f"{kind} of layer {layer}" for kind in "kv" for layer in range(2)]
    assert {(each.format, each.bytes) for each in found} == {(form, 9 * 2 * 128 * stored.itemsize)}


def test_states_of_linear_attention_are_no_keys_and_values() -> None:
    """SGLang has a pool of each within one; layer 1 of two attends."""
    keys = [torch.zeros(9, 2, 128).bfloat16()]
    states = SimpleNamespace(temporal=torch.zeros(1, 4, 2, 8, 16), conv=[torch.zeros(1, 4, 6, 3).bfloat16()])
    full = SimpleNamespace(k_buffer=keys, v_buffer=keys)
    cached = {"full_kv_pool": full, "mamba_pool": SimpleNamespace(mamba_cache=states)}
    hybrid = held(torch.bfloat16, full_attention_layer_id_mapping={1: 0}, **cached)
    found = {each.name: (each.kind, each.format) for each in hybrid if each.kind in ("kv_cache", "states")}
    assert found == {
        "k of layer 1": ("kv_cache", "bf16"),
        "v of layer 1": ("kv_cache", "bf16"),
        "rows of short convolutions": ("kv_cache", "bf16"),
        "states of linear attention": ("states", "fp32"),
    }


def test_a_padded_answer_of_a_cuda_graph_has_the_slot_that_sglang_gives_to_no_request() -> None:
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

    metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([3, 1, -1, -1], dtype=torch.int32))
    backend = SimpleNamespace(linear_attn_backend=SimpleNamespace(forward_metadata=metadata))
    mode = SimpleNamespace(is_decode_or_idle=lambda: True)
    paged = Paged(SimpleNamespace(forward_mode=mode), backend, torch.zeros(4))
    assert paged.states[0].tolist() == [3, 1, 0, 0]
    assert MambaSlotAllocator(3, "cpu").alloc(3).tolist() == [1, 2, 3]
