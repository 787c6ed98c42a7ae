"""Experts of an engine of several ranks: each computes its own, and the sum has the bits of an engine of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.ops import ExpertWeights, LowRank
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin.families import mlp
from tests.support.kernels import DEVICE

EXPERTS, TOKENS, HIDDEN, WIDE, TOP = 4, 9, 256, 128, 2
SPEC = QuantSpec.preset("fp8_block_pow2")


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().to(DEVICE)


def experts_of(first: int, count: int, fp8: bool, adapted: bool) -> tuple[ExpertWeights, ExpertWeights]:
    found = []
    for seed, (n, k) in enumerate(((2 * WIDE, HIDDEN), (HIDDEN, WIDE))):
        weights = (random(EXPERTS, n, k, seed=seed) / 16)[first : first + count].contiguous()
        operand = ops.weight_operand(quantize(weights, SPEC.weight)) if fp8 else None
        a, b = random(EXPERTS, 8, k, seed=10 + seed) / 16, random(EXPERTS, n, 8, seed=20 + seed)
        low_rank = LowRank(a[first : first + count], b[first : first + count], 0.5) if adapted else None
        found.append(ExpertWeights(weights, operand, low_rank))
    return found[0], found[1]


def on_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, sums: list[Tensor], chosen: Tensor, probs: Tensor, x: Tensor, **of: bool
) -> Tensor:
    """One of two ranks, each of which has half of the experts; `sums` collects what it gives to the all-reduce."""
    half = EXPERTS // 2
    w13, w2 = experts_of(rank * half, half, **of)

    def outputs_of(choices: Tensor, counts: Tensor) -> Tensor:
        return ops.experts(x[choices // TOP], counts, w13, w2, SPEC if of["fp8"] else None, "bf16")

    def all_reduce(own: Tensor) -> Tensor:
        sums.append(own)
        return sums[0] + sums[1] if len(sums) == 2 else own

    monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: SimpleNamespace(all_reduce=all_reduce))
    monkeypatch.setattr(mlp, "on_rank_0", lambda result: result)
    mine = chosen - rank * half
    mine = torch.where((mine < 0) | (mine >= half), -1, mine)
    return mlp._experts_of_ranks(outputs_of, mine, probs, SimpleNamespace(w13_weight=w13.weights), x.dtype)


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fp8", "adapted"), [(True, False), (False, False), (True, True)])
def test_two_ranks_add_up_to_one_engine(
    implementation: Any, fp8: bool, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    x, logits = random(TOKENS, HIDDEN, seed=30), random(TOKENS, EXPERTS, seed=31)
    with using(implementation), torch.no_grad():
        probs, chosen = ops.route(logits, TOP, True)
        order, counts = ops.group_by_expert(chosen, EXPERTS)
        whole = ops.experts(
            x[order // TOP], counts, *experts_of(0, EXPERTS, fp8, adapted), SPEC if fp8 else None, "bf16"
        )
        expected = ops.combine(whole, probs, order, x.dtype)
        sums: list[Tensor] = []
        for rank in (1, 0):
            found = on_rank(monkeypatch, rank, sums, chosen, probs, x, fp8=fp8, adapted=adapted)
    assert torch.equal(found, expected)
    zeros = sums[0] == 0
    assert zeros.any() and torch.signbit(sums[0][zeros]).all(), "x + -0 is x, also where x is -0"


def test_no_rank_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors nothing can be copied to the host."""
    pytest.importorskip("sglang")
    monkeypatch.setattr(
        "sglang.srt.distributed.get_tp_group", lambda: SimpleNamespace(all_reduce=lambda choices: choices)
    )
    monkeypatch.setattr(mlp, "on_rank_0", lambda result: result)
    chosen = torch.empty(TOKENS, TOP, dtype=torch.int64, device="meta")
    probs = torch.empty(TOKENS, TOP, device="meta")
    layer = SimpleNamespace(w13_weight=torch.empty(EXPERTS // 2, 2 * WIDE, HIDDEN, device="meta"))

    def outputs_of(choices: Tensor, counts: Tensor) -> Tensor:
        assert choices.shape == (TOKENS * TOP,) and counts.shape == (EXPERTS // 2,)
        return torch.empty(len(choices), HIDDEN, dtype=torch.bfloat16, device="meta")

    monkeypatch.setattr(mlp.ops, "combine", lambda outputs, probs, order, dtype: outputs.view(TOKENS, TOP, -1)[:, 0])
    assert mlp._experts_of_ranks(outputs_of, chosen, probs, layer, torch.bfloat16).shape == (TOKENS, HIDDEN)
