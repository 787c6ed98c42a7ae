"""The gated delta rule in exact chunks of 64 tokens: the definition that was not taken, and what it would cost.

Chunks begin at multiples of 64 of a sequence's own positions, so that a token's bits do not depend on how its tokens
are handed over; decode keeps the rows since the last multiple beside the state. The rule that is taken goes token by
token (`numerics.ops.gated_delta`). `python -m lab.studies.prototypes.gated_delta` prints counts of both for a layer of
Qwen3.5-35B-A3B, and their time on one CPU thread, beside that of chunks in matrix products, which are not exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops.gated_delta import in_chunks

CHUNK = 64
LAYERS, HEADS, KEY_HEADS, WIDTH, ROW = 30, 32, 16, 128, 8192
"""Linear layers of Qwen3.5-35B-A3B, heads of values and of keys, the width of each; tokens of a row in training."""
CONV_ROW = (2 * KEY_HEADS + HEADS) * WIDTH * 2
CASES = {"35B-A3B, 256 tokens": (1, 256, 16, 32, 128), "tiny, 16 rows of 64": (16, 64, 2, 4, 64)}
CASES["tiny, one row of 1,024"] = (1, 1024, 2, 4, 64)


class Rows(NamedTuple):
    """Tokens of a sequence, FP32. q, k: [H, T, K], normed and q scaled; v: [H, T, V]; g (log decay), beta: [H, T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, first: int, last: int) -> Rows:
        return Rows(*(x[:, first:last] for x in self))


@dataclass(frozen=True)
class State:
    """Remains of a sequence, per head, in FP32: the state at the last multiple of CHUNK, and the rows since."""

    whole: Tensor
    """[H, V, K]."""
    keys: Tensor
    """[H, CHUNK, K]."""
    updates: Tensor
    """[H, V, CHUNK]."""
    decay: Tensor
    """[H, CHUNK], the sum of log decays from the multiple to each row. Rows that are not there yet are zero."""
    rows: int = 0
    """How many are there."""

    @classmethod
    def empty(cls, heads: int, key_dim: int, value_dim: int) -> State:
        whole, keys = torch.zeros(heads, value_dim, key_dim), torch.zeros(heads, CHUNK, key_dim)
        return cls(whole, keys, torch.zeros(heads, value_dim, CHUNK), torch.zeros(heads, CHUNK))


def gated_delta(tokens: Rows, state: State) -> tuple[Tensor, State]:
    """The gated delta rule (arXiv 2412.06464) over the next tokens of a sequence: [H, T, V], and the state behind them.

    Chunks begin at multiples of CHUNK of the sequence's own positions. A row reads the state before its chunk and the
    rows of its chunk up to itself, as sums over K and over all CHUNK places, the later ones zero. So a row's result
    depends on no row behind it, and not on how the tokens were handed over. Decays are added up one after the other.
    """
    outputs, first, count = [], 0, tokens.g.shape[1]
    while first < count:
        last = min(count, first + CHUNK - state.rows)
        output, state = _rows_of_chunk(tokens.part(first, last), state)
        outputs.append(output)
        first = last
    return torch.cat(outputs, 1), state


def _rows_of_chunk(tokens: Rows, state: State) -> tuple[Tensor, State]:
    q, k, v, g, beta = tokens
    begin, end = state.rows, state.rows + q.shape[1]
    sums, total = [], state.decay[:, begin - 1] if begin else torch.zeros_like(g[:, 0])
    for one in g.unbind(1):
        total = total + one
        sums.append(total)
    here = torch.stack(sums, 1)
    keys, decay = _placed(state.keys, k, begin, 1), _placed(state.decay, here, begin, 1)
    place = torch.arange(CHUNK)
    before = place[None] < torch.arange(begin, end)[:, None]
    upto = place[None] <= torch.arange(begin, end)[:, None]
    between = here[:, :, None] - decay[:, None]
    mixed = torch.where(before, _rowwise(k, keys) * torch.where(before, between, 0.0).exp(), 0.0)
    fresh = beta[..., None] * (v - here.exp()[..., None] * _rowwise(k, state.whole))
    updates = state.updates
    for row in range(end - begin):  # each reads those before it
        known = (mixed[:, row, None] * updates).sum(-1)
        update = fresh[:, row] - beta[:, row, None] * known
        updates = _placed(updates, update[..., None], begin + row, 2)
    seen = torch.where(upto, _rowwise(q, keys) * torch.where(upto, between, 0.0).exp(), 0.0)
    output = here.exp()[..., None] * _rowwise(q, state.whole) + _rowwise(seen, updates)
    if end < CHUNK:
        return output, State(state.whole, keys, updates, decay, end)
    left = (decay[:, -1:] - decay).exp()
    added = _rowwise(updates * left[:, None], keys.transpose(1, 2))
    whole = decay[:, -1, None, None].exp() * state.whole + added
    return output, replace(State.empty(len(q), k.shape[-1], v.shape[-1]), whole=whole)


def _rowwise(rows: Tensor, others: Tensor) -> Tensor:
    """[H, M, N] from [H, M, K] and [H, N, K]: each element is one sum over K, in an order that only K decides."""
    return (rows[:, :, None] * others[:, None].contiguous()).sum(-1)


def _placed(held: Tensor, rows: Tensor, begin: int, dim: int) -> Tensor:
    before = held.narrow(dim, 0, begin)
    after = held.narrow(dim, begin + rows.shape[dim], held.shape[dim] - begin - rows.shape[dim])
    return torch.cat((before, rows, after), dim)


def main() -> None:
    torch.set_num_threads(1)
    state = HEADS * WIDTH * WIDTH
    # Decay, key times state, correction, query times state; in chunks, the triangle's solve and four products of 64.
    once = 7 * state
    chunked = 6 * state + HEADS * CHUNK * 2 * 5 * WIDTH
    ring = CHUNK * (KEY_HEADS * WIDTH + HEADS * WIDTH + HEADS)
    print(f"FLOPs of a token and layer, FP32: recurrence {once / 1e6:.2f} M, chunks {chunked / 1e6:.2f} M")
    print(f"serial steps of a row of {ROW}: recurrence {ROW}, chunks {ROW // CHUNK}")
    held = LAYERS * (4 * state + 3 * CONV_ROW)
    with_rows = held + LAYERS * 4 * ring
    print(f"a request holds {held / 1e6:.1f} MB, with the rows of a chunk in FP32 {with_rows / 1e6:.1f} MB")
    half = 4 * (state + ring / 2)
    print(f"a token's decode moves {8 * state / 1e6:.1f} MB in a layer, with half a chunk of rows {half / 1e6:.1f} MB")
    for name, sizes in CASES.items():
        for rule, call in _rules(*sizes).items():
            print(f"{name}: {rule}: forward {_ms(call, False)} ms, with gradients {_ms(call, True)} ms")


def _rules(batch: int, length: int, keys: int, heads: int, width: int) -> dict[str, Callable[[], Tensor]]:
    """Each form of the rule over rows of one length, of random tokens."""
    q, k = torch.randn(2, batch, length, keys, width).requires_grad_()
    v = torch.randn(batch, length, heads, width, requires_grad=True)
    g, beta = -torch.rand(batch, length, heads), torch.rand(batch, length, heads)
    lengths = torch.full((batch,), length)

    def recurrence() -> Tensor:
        q_, k_, v_, g_, beta_ = (x.flatten(0, 1) for x in (q, k, v, g, beta))
        return ops.gated_delta_rule(q_, k_, v_, g_, beta_, lengths)

    def exact_chunks() -> Tensor:
        """Heads of all rows in one, as `gated_delta` takes them."""
        by_head = [x.repeat_interleave(heads // keys, 2) / width for x in (q, k)]
        flat = Rows(*(x.transpose(1, 2).flatten(0, 1) for x in (*by_head, v, g, beta)))
        return gated_delta(flat, State.empty(len(flat.q), width, width))[0]

    def products() -> Tensor:
        return in_chunks(q, k, v, g, beta)

    return {"recurrence": recurrence, "exact chunks": exact_chunks, "products": products}


def _ms(call: Callable[[], Tensor], backward: bool) -> str:
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = call()
            if backward:
                out.sum().backward()
        best = min(best, time.perf_counter() - begun)
    return f"{best * 1e3:.0f}"


if __name__ == "__main__":
    main()
