"""Compare what the gated delta rule costs as a recurrence and in exact chunks of 64 tokens.

`python -m lab.studies.prototypes.gated_delta_cost` prints counts for a layer of Qwen3.5-35B-A3B and the time of both on
one CPU thread, beside transformers' own rule in chunks, which is exact in no sense.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops.gated_delta import in_chunks
from lab.studies.prototypes import gated_delta as prototype
from lab.studies.prototypes.gated_delta import CHUNK, Rows, State

LAYERS, HEADS, KEY_HEADS, WIDTH, ROW = 30, 32, 16, 128, 8192
"""Linear layers of Qwen3.5-35B-A3B, heads of values and of keys, the width of each; tokens of a row in training."""
CONV_ROW = (2 * KEY_HEADS + HEADS) * WIDTH * 2
CASES = {"35B-A3B, 256 tokens": (1, 256, 16, 32, 128), "tiny, 16 rows of 64": (16, 64, 2, 4, 64)}
CASES["tiny, one row of 1,024"] = (1, 1024, 2, 4, 64)


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
    for name, (batch, length, keys, heads, width) in CASES.items():
        q, k = torch.randn(2, batch * length, keys, width)
        v, g = torch.randn(batch * length, heads, width), -torch.rand(batch * length, heads)
        beta, lengths = torch.rand(batch * length, heads), torch.full((batch,), length)
        rows = [x.requires_grad_() for x in (q, k, v, g, beta)]

        def recurrence(rows: list[Tensor] = rows, lengths: Tensor = lengths) -> Tensor:
            return ops.gated_delta_rule(*rows, lengths)[0]

        def exact_chunks(rows: list[Tensor] = rows, batch: int = batch) -> Tensor:
            """Heads of all rows in one, as the prototype takes them."""
            own = [x.unflatten(0, (batch, -1)).transpose(1, 2) for x in rows]
            shares = own[2].shape[1] // own[0].shape[1]
            own[:2] = (x.repeat_interleave(shares, 1) / x.shape[-1] for x in own[:2])
            flat = Rows(*(x.flatten(0, 1) for x in own))
            return prototype.gated_delta(flat, State.empty(len(flat.q), flat.k.shape[-1], flat.v.shape[-1]))[0]

        def in_products(rows: list[Tensor] = rows, batch: int = batch) -> Tensor:
            first = torch.zeros(batch, rows[2].shape[1], rows[1].shape[2], rows[2].shape[2])
            return in_chunks(*(x.unflatten(0, (batch, -1)) for x in rows), first)

        for rule, call in (("recurrence", recurrence), ("exact chunks", exact_chunks), ("products", in_products)):
            print(f"{name}: {rule}: forward {_ms(call, False)} ms, with gradients {_ms(call, True)} ms")


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
