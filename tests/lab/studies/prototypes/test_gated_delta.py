"""The chunks that were not taken are exact, too, and compute the same function."""

from __future__ import annotations

import torch

from fp8rl.numerics import ops
from lab.studies.prototypes.gated_delta import Rows, State, gated_delta


def test_chunks_give_the_same_bits_in_pieces_and_one_by_one_and_the_values_of_the_rule() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 150, 2, 16, generator=draw)
    v, decays = torch.randn(150, 2, 8, generator=draw), -torch.rand(150, 2, generator=draw)
    beta = torch.rand(150, 2, generator=draw)
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    rows = Rows(*(x.transpose(0, 1) for x in (unit[0] / 4, unit[1], v, decays, beta)))
    whole, _ = gated_delta(rows, State.empty(2, 16, 8))
    for size in (41, 1):
        state, found = State.empty(2, 16, 8), []
        for first in range(0, 150, size):
            out, state = gated_delta(rows.part(first, min(first + size, 150)), state)
            found.append(out)
        assert torch.equal(torch.cat(found, 1), whole)
    expected, _ = ops.gated_delta_rule(q, k, v, decays, beta, torch.tensor([150]))
    torch.testing.assert_close(whole.transpose(0, 1), expected, rtol=0, atol=1e-6)
