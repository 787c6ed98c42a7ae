"""Rows that ranks share: attention has the bits of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.modules.rows import gathered, own_positions, shared_attention
from tests.support.ranks import run_on_ranks

WIDTH, SCALE = 1160, 0.2
"""More than a chunk of keys, and no whole number of splits for a rank."""


def tensors() -> list[Tensor]:
    """q, k, v and the gradient of the result."""
    random = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    return [torch.randn(2, WIDTH, count, 16, generator=random).bfloat16() for count in heads]


def attended(layout: Layout, config: TrainerSection) -> dict[str, Any]:
    """The result and the gradients, of all tokens, and what this rank takes of a gradient."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    mine = own_positions(WIDTH, layout.cp_rank, layout.cp_size)
    *leaves, dout = (x[:, mine].contiguous().requires_grad_() for x in tensors())
    out = shared_attention(*leaves, mine.expand(2, -1), SCALE, group)
    out.backward(dout.detach())
    found = [gathered(x.detach(), group) for x in (out, *(leaf.grad for leaf in leaves))]
    part = torch.zeros(2, len(mine), requires_grad=True)
    whole = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    (gathered(part, group) * whole).sum().backward()
    return {"found": found, "own": part.grad, "expected": whole[:, mine]}


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one_forward_and_backward(tmp_path: Path) -> None:
    q, k, v, dout = (x.requires_grad_() for x in tensors())
    out = ops.attention(q, k, v, torch.arange(WIDTH).expand(2, -1), SCALE)
    out.backward(dout.detach())
    for rank in run_on_ranks(TrainerSection(cp=2), tmp_path, attended):
        for found, expected in zip(rank["found"], (out, q.grad, k.grad, v.grad), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(rank["own"], rank["expected"])


def test_every_token_is_one_rank_s_and_all_ranks_see_as_many_keys() -> None:
    for ranks in (1, 2, 3, 4):
        parts = [own_positions(24 * ranks, rank, ranks) for rank in range(ranks)]
        assert sorted(torch.cat(parts).tolist()) == list(range(24 * ranks))
        assert len({int(part.sum()) for part in parts}) == 1
