"""Defines the gated delta rule (Yang et al. 2024, arXiv 2412.06464): linear attention with a state that is corrected.

The state S [K, V] of a head holds a value for each direction of keys. A token, in FP32 throughout:

1. S = exp(g) S: the state decays, by one factor or by one for each row (Kimi Delta Attention, arXiv 2510.26692);
2. u = beta (v - k S): the value that the state has for the key is compared with the token's value;
3. S = S + k u: the state is corrected;
4. o = q S: the result.

Before that q and k are divided by their lengths (with 1e-6 under the root), and q by sqrt(K). Each sum over K is one
FP32 sum, in an order that K alone decides. Tokens go one after the other, in training as in decode: **this recurrence
is the definition**. A token's bits depend on the tokens before it and on nothing else: not on where a prompt was cut,
where a cached prefix ended, or what else is in the batch. Only o is rounded, once, to v's dtype.

The gradient needs no fixed bits. It is computed from the same function in chunks of up to 64 tokens (section 3.2 of the
paper), which needs a few FP32 products for each chunk instead of 64 states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import Probes, composed, op
from fp8rl.numerics.ops.gates import sigmoid

LENGTH_EPS = 1e-6
"""The number that is added to the sum of squares of a query or a key."""
CHUNK, SHORTEST = 64, 16
"""Tokens of a chunk in the gradient: in long sequences, and in the shortest sequences or with a decay for each row."""
GRADIENT_TOKENS, WITH_ROWS = 16384, 2048
"""Number of tokens, with padding, whose gradient is computed at a time, to bound the memory of a packed batch.
WITH_ROWS: with a decay for each row, which takes K numbers for each pair of tokens in a chunk."""


@composed
def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decays g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), FP32 [..., heads].

    a, b [..., heads]; a_log, dt_bias [heads]. FP32 throughout; softplus(x) = max(x, 0) + log1p(exp(-|x|)).
    """
    return _DeltaGates.apply(a, b, a_log, dt_bias)


@op
def delta_gates_forward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `delta_gates` without a gradient."""
    x = a.float() + dt_bias.float()
    return -a_log.float().exp() * (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))), sigmoid(b.float())


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = delta_gates_forward(a, b, a_log, dt_bias)
        ctx.save_for_backward(a, b, a_log, dt_bias, g, beta)
        return g, beta

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        a, b, a_log, dt_bias, g, beta = ctx.saved_tensors
        dg, dbeta = grads
        da = -dg * a_log.float().exp() * sigmoid(a.float() + dt_bias.float())
        sums = ((dg * g).flatten(0, -2).sum(0), da.flatten(0, -2).sum(0))
        of_vectors = (total.to(vector.dtype) for total, vector in zip(sums, (a_log, dt_bias), strict=True))
        return da.to(a.dtype), (dbeta * beta * (1 - beta)).to(b.dtype), *of_vectors


@composed
def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Tensor) -> Tensor:
    """Run the rule over whole sequences that are end to end. Their states start from zeros.

    q, k [T, key heads, K], neither normed nor scaled; v [T, heads, V]; g, beta FP32 [T, heads], as `delta_gates` gives
    them, or g [T, heads, K]. Each key head serves equally many consecutive heads. lengths int64 [B], 0 or more each,
    with the sum T. Returns [T, heads, V].
    """
    return _GatedDeltaRule.apply(q, k, v, g, beta, lengths)


@op
def paged_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cache: Tensor,
    slots: Tensor,
    lengths: Tensor,
    begun: Tensor,
) -> Tensor:
    """Run `gated_delta_rule` over sequences whose states are in slots of a cache, and store the new states there.

    cache FP32 [slots, heads, K, V]; slots int64 [B], all different; begun bool [B], True if the sequence had tokens
    before, so that its slot is read; otherwise it starts from zeros. Returns [T, heads, V]. No gradient.
    """
    before = torch.where(begun[:, None, None, None], cache[slots], 0.0)
    out, cache[slots] = _recurrence(*_unit(q, k), v, g, beta, lengths, before)
    return out


class _GatedDeltaRule(torch.autograd.Function):
    """Runs the rule over a cache with a slot for each sequence."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta, lengths)
        cache = v.new_empty(len(lengths), v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)
        slots = torch.arange(len(lengths), device=v.device)
        begun = torch.zeros_like(slots, dtype=torch.bool)
        return paged_gated_delta_rule(q, k, v, g, beta, cache, slots, lengths, begun)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *inputs, lengths = ctx.saved_tensors
        return *gated_delta_gradients(grads[0], inputs, lengths), None


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence for q, k in FP32, normed. Sequences are sorted, the longest first, and take their steps
    together, so that the sequences that still have tokens are always the first ones."""
    count = lengths.tolist()
    order = sorted(range(len(count)), key=lambda sequence: -count[sequence])
    starts, longest = [0], max(count, default=0)
    for length in count:
        starts.append(starts[-1] + length)
    running = [sum(length > step for length in count) for step in range(longest)]
    turns = torch.tensor([starts[b] + step for step, active in enumerate(running) for b in order[:active]])
    turns = turns.to(device=v.device, dtype=torch.int64)
    places = torch.tensor(order, device=v.device, dtype=torch.int64)

    shares = v.shape[1] // k.shape[1]
    state = states[places].contiguous()
    by_step = (x[turns].split(running) for x in (q, k, v.float(), g.exp(), beta))
    found = []
    for q_t, k_t, v_t, decay, beta_t in zip(*by_step, strict=True):
        now = state[: len(v_t)]
        k_t, q_t = (x.repeat_interleave(shares, 1).unsqueeze(-1) for x in (k_t, q_t))
        now *= decay.reshape(*decay.shape[:2], -1, 1)
        update = (v_t - (now * k_t).sum(-2)) * beta_t[..., None]
        now += k_t * update.unsqueeze(-2)
        found.append((now * q_t).sum(-2))
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if found:
        out[turns] = torch.cat(found).to(v.dtype)
    return out, torch.empty_like(state).index_copy_(0, places, state)


def _unit(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys of length one, queries scaled, in FP32 or the dtype that is wider."""

    def normed(x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS)

    return normed(q) * q.shape[-1] ** -0.5, normed(k)


def gated_delta_gradients(dout: Tensor, inputs: list[Tensor], lengths: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g and beta from dout, the gradient of the result.

    Each has the dtype of its input. Sequences of similar length are computed together, `GRADIENT_TOKENS` at a time.
    """
    found = [torch.zeros_like(x) for x in inputs]
    starts = lengths.cumsum(0) - lengths
    rows = inputs[3].dim() == 3
    for some in _parts(lengths, WITH_ROWS if rows else GRADIENT_TOKENS):
        some_lengths = lengths[some, None]
        longest = int(some_lengths.max())
        # padded to less than twice as many tokens
        chunk = min(SHORTEST if rows else CHUNK, max(SHORTEST, 1 << (longest - 1).bit_length()))
        width = -(-longest // chunk) * chunk
        steps = torch.arange(width, device=dout.device)
        real = steps < some_lengths
        tokens = (starts[some, None] + steps)[real]

        def padded(x: Tensor, real: Tensor = real, tokens: Tensor = tokens) -> Tensor:
            return x.new_zeros(*real.shape, *x.shape[1:]).index_put((real,), x[tokens])

        leaves = [padded(x).requires_grad_() for x in inputs]
        with torch.enable_grad():
            q, k, v, g, beta = leaves
            out = in_chunks(q, k, v, g, beta, chunk)
        for whole, part in zip(found, torch.autograd.grad(out, leaves, padded(dout).to(out.dtype)), strict=True):
            whole[tokens] = part[real]
    return tuple(found)


def _parts(lengths: Tensor, tokens: int) -> Iterator[Tensor]:
    """Yield the indices of sequences whose gradients are computed together: one sequence, or several with lengths
    within a factor of two and at most `tokens` tokens in all."""
    if lengths.is_meta:  # nobody knows them, and these products launch no kernel of ours
        return
    groups: dict[int, list[int]] = {}
    count = lengths.tolist()
    for sequence, length in enumerate(count):
        if length:
            groups.setdefault(max(length - 1, SHORTEST - 1).bit_length(), []).append(sequence)
    for _, group in sorted(groups.items()):
        fit = max(1, tokens // max(count[sequence] for sequence in group))
        for first in range(0, len(group), fit):
            yield torch.tensor(group[first : first + fit], device=lengths.device)


def in_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Compute the rule in chunks of tokens, to differentiate it. The result does not have the recurrence's bits.

    q, k [B, S, key heads, K], neither normed nor scaled; v [B, S, heads, V]; g, beta [B, S, heads], or g [B, S, heads,
    K]; S a multiple of `chunk`. Rows end with zeros as padding. Returns [B, S, heads, V], FP32 or the wider dtype.
    """
    shares = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(shares, 2) for x in _unit(q, k))
    # [B, heads, chunks, chunk, ...]
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (q, k, v.to(q.dtype)))
    g, beta = g.reshape(*beta.shape, -1), beta.unsqueeze(-1)
    g, beta = (x.to(q.dtype).transpose(1, 2).unflatten(2, (-1, chunk)) for x in (g, beta))
    until = g.cumsum(-2).exp()  # [B, heads, chunks, chunk, 1 or K]
    pairs = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device)
    # The sum from one token to another: the difference of two long sums would lose what is small behind a strong decay.
    steps = g[..., None, :].masked_fill(pairs.triu()[..., None], 0.0).cumsum(-3)
    between = steps.masked_fill(pairs.triu(1)[..., None], -torch.inf).exp()

    def decayed(x: Tensor) -> Tensor:
        """Return the products of each row of x with the keys up to it in its chunk, decayed since the key's token."""
        if between.shape[-1] == 1:
            return (x @ k.transpose(-1, -2)) * between[..., 0]
        return (x[..., :, None, :] * k[..., None, :, :] * between).sum(-1)

    # Updates u of a chunk answer to the state before it, and to each other: (1 + M) u = beta (v - decayed k S).
    mixed, targets = beta * decayed(k), torch.cat((v, k * until), -1) * beta
    values, keys = torch.linalg.solve_triangular(mixed.tril(-1), targets, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    seen, asked = decayed(q), q * until
    kept, left = until[..., -1, :, None], k * between[..., -1, :, :]
    state, found = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for at in range(q.shape[2]):
        updates = values[:, :, at] - keys[:, :, at] @ state
        found.append(asked[:, :, at] @ state + seen[:, :, at] @ updates)
        state = kept[:, :, at] * state + left[:, :, at].transpose(-1, -2) @ updates
    return torch.stack(found, 2).flatten(2, 3).transpose(1, 2)


def _trial(random: Callable[..., Tensor], count: int) -> dict[str, Callable[[int], Tensor]]:
    q, k, v = random(count, 2, 64), random(count, 2, 64), random(count, 4, 32)
    a, b, a_log, dt_bias = random(count, 4), random(count, 4), random(4), random(4)
    rows = -random(count, 4, 64).abs()

    def rule(n: int, rows: Tensor | None = None) -> Tensor:
        """Return the outputs of one sequence."""
        g, beta = delta_gates(a[:n], b[:n], a_log, dt_bias)
        g = g if rows is None else rows[:n].float()
        return gated_delta_rule(q[:n], k[:n], v[:n], g, beta, torch.tensor([n], device=q.device))

    return {"gated_delta_rule": rule, "gated_delta_rule of rows": partial(rule, rows=rows)}


PROBES = Probes(rows=_trial)
