"""Experts of an engine of several ranks: each computes its own, and the sum has the bits of an engine of one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.models.families.mlp import EXPERTS as FORM
from fp8rl.models.program import Op, OpSite
from fp8rl.models.tensors import EngineRank
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.ops import ExpertWeights, LowRank
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import host
from fp8rl.rollout.engine.plugin.host import EngineHost
from tests.support.kernels import random

EXPERTS, TOKENS, HIDDEN, WIDE, TOP = 4, 9, 256, 128, 2
SPEC = QuantSpec.preset("fp8_block_pow2")


def experts_of(first: int, count: int, fp8: bool, adapted: bool) -> tuple[ExpertWeights, ExpertWeights]:
    found = []
    for seed, (n, k) in enumerate(((2 * WIDE, HIDDEN), (HIDDEN, WIDE))):
        weights = (random(EXPERTS, n, k, seed=seed) / 16)[first : first + count].contiguous()
        operand = ops.weight_operand(quantize(weights, SPEC.weight)) if fp8 else None
        a, b = random(EXPERTS, 8, k, seed=10 + seed) / 16, random(EXPERTS, n, 8, seed=20 + seed)
        low_rank = LowRank(a[first : first + count], b[first : first + count], 0.5) if adapted else None
        found.append(ExpertWeights(weights, operand, low_rank))
    return found[0], found[1]


SITE = OpSite(0, Op("experts", FORM, (), ()))


def on_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, own: tuple[ExpertWeights, ExpertWeights], all_reduce: Any, fp8: bool
) -> Any:
    """The host of one of two ranks, each of which has half of the experts: `own`."""
    known = {id(each.weights): each for each in own}
    weights = SimpleNamespace(stacks={(0, "experts"): [each.weights for each in own]})
    served = SimpleNamespace(low_rank=lambda stack: known[id(stack)].low_rank)
    monkeypatch.setattr(host, "state", lambda: SimpleNamespace(weights=served))
    spec = SPEC if fp8 else QuantSpec.preset("bf16")
    return SimpleNamespace(
        rank=EngineRank(rank, 2), spec=spec, weights=weights, _group=SimpleNamespace(all_reduce=all_reduce),
        _operand=lambda stack: known[id(stack)].operand,
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fp8", "adapted"), [(True, False), (False, False), (True, True)])
def test_two_ranks_add_up_to_one_engine(
    implementation: Any, fp8: bool, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, logits = random(TOKENS, HIDDEN, seed=30), random(TOKENS, EXPERTS, seed=31)
    with using(implementation), torch.no_grad():
        probs, chosen = ops.route(logits, TOP, True)
        order, counts = ops.group_by_expert(chosen, EXPERTS)
        whole = ops.experts(
            x[order // TOP], counts, *experts_of(0, EXPERTS, fp8, adapted), SPEC if fp8 else None, "bf16"
        )
        expected = ops.combine(whole, probs, order, x.dtype)
        sums: list[Tensor] = []
        half = EXPERTS // 2

        def all_reduce(own: Tensor) -> Tensor:
            sums.append(own)
            return sums[0] + sums[1] if len(sums) == 2 else own

        for rank in (1, 0):
            one = on_rank(monkeypatch, rank, experts_of(rank * half, half, fp8, adapted), all_reduce, fp8)
            found = EngineHost.experts(one, SITE, x, probs, chosen)
    assert torch.equal(found, expected)
    zeros = sums[0] == 0
    assert zeros.any() and torch.signbit(sums[0][zeros]).all(), "x + -0 is x, also where x is -0"


@pytest.mark.parametrize(("fp8", "adapted"), [(True, False), (False, False), (True, True)])
def test_two_ranks_with_two_slices_of_k_each_add_up_to_one_engine_with_four(
    fp8: bool, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, deep = random(TOKENS, 4 * WIDE, seed=40), random(HIDDEN, 4 * WIDE, seed=41), 2 * WIDE
    a, b = random(8, 4 * WIDE, seed=42) / 16, random(HIDDEN, 8, seed=43)
    spec, sums = SPEC if fp8 else QuantSpec.preset("bf16"), list[Tensor]()

    def product_of(rank: EngineRank) -> Tensor:
        own = slice(rank.rank * deep, (rank.rank + 1) * deep) if rank.ranks > 1 else slice(None)
        part, low_rank = weight[:, own].contiguous(), LowRank(a[:, own].contiguous(), b, 0.5) if adapted else None
        operand = ops.weight_operand(quantize(part, SPEC.weight)) if fp8 else None
        monkeypatch.setattr(
            host, "state", lambda: SimpleNamespace(weights=SimpleNamespace(low_rank=lambda weight: low_rank))
        )
        product = host.Product(torch.nn.Parameter(part, requires_grad=False), [HIDDEN], row_parallel=True)
        one: Any = SimpleNamespace(
            rank=rank, spec=spec, numerics=SimpleNamespace(k_splits=4), _operand=lambda weight: operand,
            weights=SimpleNamespace(products={(0, "experts"): product}), _group=SimpleNamespace(all_gather=all_gather),
        )  # fmt: skip
        one._merged = partial(EngineHost._merged, one)
        return EngineHost.product(one, SITE, x[:, own].contiguous())

    def all_gather(own: Tensor, dim: int) -> Tensor:
        sums.append(own)
        return torch.cat((own, sums[0]), dim)

    with torch.no_grad():
        expected = product_of(EngineRank())
        found = [product_of(EngineRank(rank, 2)) for rank in (1, 0)][1]
    assert sums[0].shape[0] == 2 and sums[0].dtype == torch.float32
    assert torch.equal(found, expected)


def test_no_rank_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors nothing can be copied to the host."""
    stacks = (torch.empty(EXPERTS // 2, *shape, device="meta") for shape in ((2 * WIDE, HIDDEN), (HIDDEN, WIDE)))
    one = on_rank(monkeypatch, 1, tuple(ExpertWeights(stack, None, None) for stack in stacks), lambda own: own, False)
    chosen = torch.empty(TOKENS, TOP, dtype=torch.int32, device="meta")
    probs, x = torch.empty(TOKENS, TOP, device="meta"), torch.empty(TOKENS, HIDDEN, device="meta").bfloat16()

    def experts(x: Tensor, counts: Tensor, *_: Any) -> Tensor:
        assert x.shape == (TOKENS * TOP, HIDDEN) and counts.shape == (EXPERTS // 2,)
        return x

    monkeypatch.setattr(host.ops, "experts", experts)
    monkeypatch.setattr(host.ops, "combine", lambda outputs, probs, order, dtype: outputs.view(TOKENS, TOP, -1)[:, 0])
    assert EngineHost.experts(one, SITE, x, probs, chosen).shape == (TOKENS, HIDDEN)
