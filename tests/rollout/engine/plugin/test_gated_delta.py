"""States of linear attention in SGLang's slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fp8rl.rollout.engine.plugin.families.gated_delta import States


def batch_of(indices: list[int]) -> tuple[Any, Any]:
    """SGLang's backend and batch of a decode step; its pool has four slots."""
    held = SimpleNamespace(conv=[torch.zeros(4, 6, 3)], temporal=torch.zeros(4, 2, 8, 16))
    backend = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda layer: held),
        forward_metadata=SimpleNamespace(mamba_cache_indices=torch.tensor(indices, dtype=torch.int32)),
    )
    mode = SimpleNamespace(is_decode_or_idle=lambda: True)
    return backend, SimpleNamespace(forward_mode=mode)


def test_a_padded_answer_of_a_cuda_graph_has_the_slot_that_sglang_gives_to_no_request() -> None:
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

    backend, batch = batch_of([3, 1, -1, -1])
    states = States.of(backend, 0, batch)
    assert states.slots.tolist() == [3, 1, 0, 0]
    assert states.rows.shape == (4, 3, 6) and states.rule.shape == (4, 2, 16, 8)
    assert MambaSlotAllocator(3, "cpu").alloc(3).tolist() == [1, 2, 3]
