"""Kernels of linear attention against their torch definitions, values and gradients; and one kernel for all callers."""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.kernels import gated_delta, short_conv
from tests.numerics.kernels.test_elementwise import close, compared
from tests.support.elsewhere import compiled_elsewhere
from tests.support.kernels import DEVICE, random

LENGTHS = [19, 1, 33, 0, 2]


def lengths(*values):
    return torch.tensor(values, device=DEVICE)


def tokens(count, values=24, decays=False):
    """q, k, v, g and beta of four heads, two of which share a key; widths that fill no block. decays: for each row."""
    q, k, v = random(count, 2, 48), random(count, 2, 48, seed=1), random(count, 4, values, seed=2)
    a, b = random(count, 4, seed=3), random(count, 4, seed=4)
    g, beta = ops.delta_gates(a, b, random(4, seed=5), random(4, seed=6))
    return [q, k, v, -random(count, 4, 48, seed=8, dtype=torch.float32).exp() if decays else g, beta]


@pytest.mark.slow
@pytest.mark.parametrize("decays", [False, True])
def test_the_rule_is_the_definition(decays):
    own = lengths(6, 1, 11, 0, 2)
    rows = tokens(int(own.sum()), decays=decays)
    compared(lambda *x: ops.gated_delta_rule(*x, own), *rows)
    states, where = random(len(own), 4, 48, 24, seed=7, dtype=torch.float32), (torch.arange(5, device=DEVICE), own)
    last, state = states.clone(), states.clone()
    found = gated_delta.paged_gated_delta_rule(*rows, last, *where, own >= 0)
    close(found, ops.paged_gated_delta_rule(*rows, state, *where, own >= 0))
    torch.testing.assert_close(last, state, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("decays", [False, True])
def test_a_cache_gives_the_bits_of_whole_sequences_in_pieces_and_single_tokens(decays):
    """And a new request reads nothing of its slot."""
    rows, x, weight = tokens(30, decays=decays), random(30, 200, seed=8), random(200, 4, seed=9)
    whole, states = (lengths(0, 1), lengths(18, 12), lengths(0, 0).bool()), torch.empty(2, 4, 48, 24, device=DEVICE)
    held = torch.empty(2, 3, 200, dtype=torch.bfloat16, device=DEVICE)
    expected, mixed = ops.paged_gated_delta_rule(*rows, states, *whole), ops.paged_causal_conv(x, weight, held, *whole)
    assert torch.equal(ops.gated_delta_rule(*rows, lengths(18, 12)), expected)
    assert torch.equal(ops.causal_conv(x, weight, lengths(18, 12)), mixed)
    cache, kept = torch.full((5, 4, 48, 24), torch.nan), torch.full((5, 200, 3), torch.nan).bfloat16()
    cache, kept, slots = cache.to(DEVICE), kept.to(DEVICE).transpose(1, 2), lengths(3, 1)
    found, convolved = torch.zeros_like(expected), torch.zeros_like(mixed)
    for first, last in ((0, 1), (1, 3), (3, 12)):
        here = torch.cat([torch.arange(first, last), 18 + torch.arange(first, last)]).to(DEVICE)
        where = slots, lengths(last - first, last - first), torch.full((2,), first > 0, device=DEVICE)
        found[here] = ops.paged_gated_delta_rule(*(y[here] for y in rows), cache, *where)
        convolved[here] = ops.paged_causal_conv(x[here], weight, kept, *where)
    here, alone = torch.arange(12, 18).to(DEVICE), (slots[:1], lengths(6), lengths(1).bool())
    found[here] = ops.paged_gated_delta_rule(*(y[here] for y in rows), cache, *alone)
    convolved[here] = ops.paged_causal_conv(x[here], weight, kept, *alone)
    assert torch.equal(found, expected) and torch.equal(cache[slots], states)
    assert torch.equal(convolved, mixed) and torch.equal(kept[slots], held)
    assert cache[[0, 2, 4]].isnan().all() and kept[[0, 2, 4]].isnan().all()


def test_a_cache_whose_states_do_not_lie_in_one_piece_is_refused():
    rows, cache = tokens(1), torch.zeros(2, 4, 24, 48, device=DEVICE).transpose(2, 3)
    with pytest.raises(ValueError, match=r"strides \(4608, 1152, 1, 48\), expected each state contiguous"):
        gated_delta.paged_gated_delta_rule(*rows, cache, lengths(1), lengths(1), lengths(1).bool())


@pytest.mark.slow
def test_the_convolution_is_the_definition():
    x, weight = random(sum(LENGTHS), 200), random(200, 4, seed=1)
    held = random(len(LENGTHS), 3, 200, seed=2)
    last, own = held.clone(), lengths(*LENGTHS)
    where = torch.arange(len(LENGTHS), device=DEVICE), own, own >= 0
    close(short_conv.paged_causal_conv(x, weight, held, *where), ops.paged_causal_conv(x, weight, last, *where))
    assert torch.equal(held, last)
    compared(lambda *y: ops.causal_conv(*y, own), x, weight)


ELEMENTWISE = {
    "sigmoid_gate": ((11, 300), (11, 300)), "token_gate": ((5, 300), (5, 200), (1, 200)),
    "gated_rms_norm": ((5, 3, 96), (5, 3, 96), (96,)), "delta_gates": ((9, 6), (9, 6), (6,), (6,)),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_gate_is_its_definition(name):
    more = (1e-6,) if name == "gated_rms_norm" else ()
    inputs = [random(*shape, seed=seed, scale=3) for seed, shape in enumerate(ELEMENTWISE[name])]
    compared(lambda *x: getattr(ops, name)(*x, *more), *inputs)


def test_small_decays_are_not_lost():
    """A GPU's exp is 2 to a rounded power of up to 44, which is off by as many times 2^-24."""
    a = torch.tensor([[-30.0, -15.0, 0.0, 15.0, 80.0, 3e4]], device=DEVICE)
    expected, _ = ops.delta_gates(a, a, a[0] * 0, a[0] * 0)
    with using("triton"):
        found, _ = ops.delta_gates(a, a, a[0] * 0, a[0] * 0)
    torch.testing.assert_close(found, expected, rtol=44 * 2**-24 if DEVICE == "cuda" else 1e-6, atol=0)


SCRIPT = """
import torch
from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.kernels import gated_delta, short_conv
from tests.support.hopper import compiled_only

def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)

def rule(tokens, sequences):
    lengths = torch.full((sequences,), tokens // sequences)
    q, v, g = tensor(tokens, 16, 128), tensor(tokens, 32, 128), tensor(tokens, 32, dtype=torch.float32)
    where = torch.arange(sequences), lengths, torch.ones(sequences, dtype=torch.bool)
    ops.gated_delta_rule(q, q, v, g, g, lengths)
    gated_delta.paged_gated_delta_rule(q, q, v, g, g, tensor(300, 32, 128, 128, dtype=torch.float32), *where)
    x, weight = tensor(tokens, 8192), tensor(8192, 4)
    ops.causal_conv(x, weight, lengths)
    short_conv.paged_causal_conv(x, weight, tensor(300, 8192, 3).transpose(1, 2), *where)
    return v, g

with using("triton"), compiled_only(loops=True) as found:
    rule(8192, 1)
    rule(1, 1)
    v, g = rule(257, 257)
    ops.delta_gates(g, g, g[0], g[0])
    ops.gated_rms_norm(v, v, v[0, 0], 1e-6)
    ops.sigmoid_gate(tensor(257, 4096), tensor(257, 4096))
    ops.token_gate(tensor(257, 2048), tensor(257, 2048), tensor(1, 2048))
"""


@pytest.mark.slow
def test_on_an_h200_all_stays_in_registers_and_every_caller_of_the_rule_runs_one_kernel():
    """Qwen3.5-35B-A3B: rows of 8,192 tokens, and decode of one and of 257 requests, each in the trainer and over an
    engine's states. A convolution finds its sequence by adding up lengths, of all threads."""
    kernels = compiled_elsewhere(SCRIPT)
    rule = [kernel for kernel in kernels if kernel["name"] == "_rule_kernel"]
    assert len(rule) == 6 and {kernel["blocks"] for kernel in rule} == {32 * 16, 257 * 32 * 16}
    assert len({str({**kernel, "blocks": 0}) for kernel in rule}) == 1
    channels = [
        [{text: n for text, n in loop.items() if "SHFL" not in text} for loop in kernel["arithmetic"]]
        for kernel in kernels
        if kernel["name"] == "_kernel"
    ]
    assert len(channels) == 6 and all(each == channels[0] for each in channels) and sum(channels[0][0].values()) > 200
    for kernel in kernels:
        assert not kernel["spilled"] and kernel["shared"] <= 32 * 1024, kernel
