"""Linear attention's ops: the same bits however tokens are handed over, and the gradients of the definition in FP64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics import ops
from tests.numerics.ops.test_ops import random

LENGTHS = [330, 5, 96, 1, 1150]


def tokens(count: int, dtype: torch.dtype = torch.bfloat16, rows: bool = False) -> list[Tensor]:
    """rows: with a decay for each row of a state, some of them so strong that nothing is left after a token."""
    q, k, v = (random(count, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(((2, 64), (2, 64), (4, 64))))
    a, b = random(count, 4, seed=3, dtype=dtype), random(count, 4, seed=4, dtype=dtype)
    g, beta = ops.delta_gates(a, b, random(4, seed=5, dtype=dtype), random(4, seed=6, dtype=dtype))
    return [q, k, v, -(3 * random(count, 4, 64, seed=7, dtype=torch.float32)).exp() if rows else g, beta]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int]) -> Tensor:
    """The rule of the paper, token by token, in the precision of what it is given."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q / q.shape[-1] ** 0.5, k))
    found = []
    for some in zip(*(x.split(lengths) for x in (q, k, v, g, beta)), strict=True):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for q_t, k_t, v_t, g_t, beta_t in zip(*some, strict=True):
            state = state * g_t.exp().view(len(state), -1, 1)
            update = beta_t[:, None] * (v_t - torch.einsum("hkv,hk->hv", state, k_t))
            state = state + torch.einsum("hk,hv->hkv", k_t, update)
            found.append(torch.einsum("hkv,hk->hv", state, q_t))
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("decays", [False, True])
def test_a_token_has_the_same_bits_in_a_batch_and_alone_in_one_piece_in_chunks_of_96_and_one_by_one(
    decays: bool,
) -> None:
    rows = tokens(sum(LENGTHS), rows=decays)
    together = ops.gated_delta_rule(*rows, torch.tensor(LENGTHS))
    assert together.numel() > 250_000
    for *own, expected in zip(*(x.split(LENGTHS) for x in (*rows, together)), strict=True):
        caches = torch.full((3, 4, 64, 64), torch.nan)
        for slot, piece in enumerate((len(expected), 96, 1)):
            found: list[Tensor] = []
            for some in zip(*(x.split(piece) for x in own), strict=True):
                where = torch.tensor([slot]), torch.tensor([len(some[0])]), torch.tensor([bool(found)])
                found.append(ops.paged_gated_delta_rule(*some, caches, *where))
            assert torch.equal(torch.cat(found), expected) and torch.equal(caches[slot], caches[0])


@pytest.mark.parametrize("decays", [False, True])
def test_values_and_gradients_are_those_of_the_recurrence_in_float64(decays: bool) -> None:
    """More tokens than one chunk of the gradient, chunks of all sizes, a sequence of one token, and one of none."""
    lengths = [135, 1, 32, 17, 15, 0]
    rows = [x.requires_grad_() for x in tokens(200, torch.float32, decays)]
    weight = random(200, 4, 64, seed=9, dtype=torch.float64)
    out = ops.gated_delta_rule(*rows, torch.tensor(lengths))
    exact = [x.detach().double().requires_grad_() for x in rows]
    right = recurrence(*exact, lengths)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-6)
    theirs = torch.autograd.grad((right * weight).sum(), exact)
    for mine, their in zip(torch.autograd.grad((out * weight).sum(), rows), theirs, strict=True):
        assert (mine - their).norm() < 2e-6 * their.norm()


def _conv(x: Tensor, weight: Tensor) -> Tensor:
    parts = [
        F.conv1d(own.t()[None], weight[:, None], padding=3, groups=96)[0, :, : len(own)] for own in x.split([5, 2])
    ]
    return F.silu(torch.cat(parts, 1)).t()


def _normed(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6) * F.silu(gate)


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    return torch.stack((-a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()))


GRADIENTS = {
    "causal_conv": (lambda x, w: ops.causal_conv(x, w, torch.tensor([5, 2])), _conv, ((7, 96), (96, 4))),
    "gated_rms_norm": (lambda x, z, w: ops.gated_rms_norm(x, z, w, 1e-6), _normed, ((7, 3, 32), (7, 3, 32), (32,))),
    "sigmoid_gate": (ops.sigmoid_gate, lambda x, gate: x * gate.sigmoid(), ((7, 96), (7, 96))),
    "token_gate": (ops.token_gate, lambda x, h, w: x * (h @ w.t()).sigmoid(), ((7, 96), (7, 64), (1, 64))),
    "delta_gates": (lambda *x: torch.stack(ops.delta_gates(*x)), _gates, ((7, 4), (7, 4), (4,), (4,))),
    "one_plus": (
        lambda x, w: ops.rms_norm(x, ops.one_plus(w), 1e-6),
        lambda x, w: F.rms_norm(x, w.shape, 1 + w, 1e-6),
        ((7, 96), (96,)),
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_values_and_gradients_are_those_of_torch_in_float64(name: str) -> None:
    op, reference, shapes = GRADIENTS[name]
    inputs = [random(*shape, seed=seed, dtype=torch.float32).requires_grad_() for seed, shape in enumerate(shapes)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, right = op(*inputs), reference(*exact)
    torch.testing.assert_close(out.double(), right, rtol=1e-6, atol=1e-6)
    weight = random(*out.shape, seed=9, dtype=torch.float64)
    theirs = torch.autograd.grad((right * weight).sum(), exact)
    for mine, their in zip(torch.autograd.grad((out * weight).sum(), inputs), theirs, strict=True):
        torch.testing.assert_close(mine.double(), their, rtol=2e-5, atol=2e-6)


def test_gates_do_not_lose_small_decays() -> None:
    a = torch.tensor([[-30.0, -15.0, 0.0, 15.0, 80.0, 3e4]])
    g, _ = ops.delta_gates(a, a, torch.zeros(6), torch.zeros(6))
    torch.testing.assert_close(-g.double(), torch.logaddexp(a.double(), torch.zeros(())), rtol=1e-6, atol=0)
