"""The gradient of an embedding: each token's rows are added in their order, in place, with the definition's bits."""

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from tests.support.atomics import Atomics
from tests.support.kernels import DEVICE, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_what_the_definition_adds(dtype: torch.dtype) -> None:
    rows, held = random(40, 1100, scale=3.0), random(9, 1100, seed=1).to(dtype)
    tokens = torch.randint(-2, 12, (40,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found = {}
    for implementation in ("torch", "triton"):
        found[implementation] = held.clone()
        with using(implementation), Atomics() as atomics:
            ops.add_by_token(found[implementation], rows, tokens)
        assert atomics.found == []
    assert torch.equal(found["torch"], found["triton"])
    for token in range(9):
        total = torch.zeros(1100, device=DEVICE)
        for row in rows[tokens == token]:
            total += row.float()
        assert torch.equal(found["torch"][token], held[token] + total.bfloat16().to(dtype))


def test_nothing_is_added_where_no_token_is_this_rank_s() -> None:
    total = random(4, 64).float()
    for implementation in ("torch", "triton"):
        with using(implementation):
            ops.add_by_token(before := total.clone(), random(2, 64), torch.tensor([-1, 4], device=DEVICE))
            ops.add_by_token(before, random(0, 64), torch.zeros(0, dtype=torch.int64, device=DEVICE))
        assert torch.equal(before, total)
