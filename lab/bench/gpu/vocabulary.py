"""Draw, log-probabilities and paged attention of a decode step with a real vocabulary and long contexts."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.backend.implementation import using
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch, random

FEW = 8
"""Rows that are computed by the definition, too."""
TEMPERATURE = 0.7
HEADS, KV_HEADS, HEAD = 32, 4, 128
WITHIN = 8e-6
"""A log-probability's error: max, logarithm and difference are each within an FP32 rounding of a number up to 50."""


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    bandwidth = watch.copy_bandwidth()
    logits = random(sizes.rows, sizes.vocabulary, device=watch.device, scale=4.0)
    _draw(done, watch, logits, bandwidth)
    _logprobs(done, watch, logits, bandwidth)
    for rows, keys in sizes.attended:
        _attention(done, watch, rows, keys, bandwidth)


def _draw(done: Measured, watch: Stopwatch, logits: Tensor, bandwidth: float) -> None:
    rows = len(logits)
    temperatures = torch.full((rows,), TEMPERATURE, device=watch.device)
    seeds = torch.randint(1 << 62, (rows,), device=watch.device)
    positions = torch.randint(1 << 15, (rows,), device=watch.device)
    drawn = ops.draw(logits, temperatures, seeds, positions)
    with using("torch"):
        expected = ops.draw(*(each[:FEW] for each in (logits, temperatures, seeds, positions)))
    done.equal("drawn tokens that are not the definition's", int((drawn[:FEW] != expected).sum()), tokens=len(expected))
    times = watch.times(lambda: ops.draw(logits, temperatures, seeds, positions))
    _row(done, "draw", rows, logits.shape[1], logits.nbytes, times, bandwidth)


def _logprobs(done: Measured, watch: Stopwatch, logits: Tensor, bandwidth: float) -> None:
    rows, vocabulary = logits.shape
    tokens = torch.randint(vocabulary, (rows,), device=watch.device)
    found = ops.token_logprobs(logits, tokens, TEMPERATURE)[0]
    alone = torch.cat([ops.token_logprobs(logits[i : i + 1], tokens[i : i + 1], TEMPERATURE)[0] for i in range(FEW)
                       if i < rows])  # fmt: skip
    done.equal("log-probabilities that depend on the batch", int((alone != found[: len(alone)]).sum()), rows=len(alone))
    exact = (logits[:FEW].double() / torch.tensor(TEMPERATURE).double()).log_softmax(-1)
    error = (found[:FEW].double() - exact.gather(1, tokens[:FEW, None]).squeeze(1)).abs().max().item()
    done.bound("log-probabilities: largest error to float64", error, WITHIN, rows=len(alone))
    times = watch.times(lambda: ops.token_logprobs(logits, tokens, TEMPERATURE))
    _row(done, "log-probabilities", rows, vocabulary, logits.nbytes, times, bandwidth)
    with torch.enable_grad():
        leaf = logits.requires_grad_()
        total = ops.token_logprobs(leaf, tokens, TEMPERATURE)[0].sum()
        times = watch.times(lambda: torch.autograd.grad(total, leaf, retain_graph=True))
    logits.requires_grad_(False)
    _row(done, "their gradient", rows, vocabulary, 2 * logits.nbytes, times, bandwidth)


def _attention(done: Measured, watch: Stopwatch, rows: int, keys: int, bandwidth: float) -> None:
    """Decode: one query of each sequence over all its keys."""
    device, slots = watch.device, rows * keys
    caches = random(2, slots, KV_HEADS, HEAD, device=device)
    table = torch.randperm(slots, device=device).view(rows, keys).int()
    q, everyone = random(rows, HEADS, HEAD, device=device), torch.arange(rows, device=device)
    ones, lengths = torch.ones_like(everyone), torch.full_like(everyone, keys)

    def decode(count: int = rows) -> Tensor:
        some = (everyone[:count], ones[:count], lengths[:count])
        return ops.paged_attention(q[:count], *caches, table, *some, HEAD**-0.5)

    few = min(FEW, rows)
    k, v = (cache[table[:few].long()] for cache in caches)
    whole = ops.attention(q[:few, None], k, v, lengths[:few, None] - 1, HEAD**-0.5).squeeze(1)
    found = decode()
    different = int((found[:few] != whole).sum()) + int((found[:few] != decode(few)).sum())
    done.equal(f"attention over {keys:,} keys: paged, contiguous, and alone, numbers that differ", different, rows=few)
    error, bound = _error(found[:few], q[:few], k, v)
    done.bound(f"attention over {keys:,} keys: largest error to float64 / its bound", error / bound, 1.0, rows=few)
    _row(done, "paged attention, decode", rows, keys, caches.nbytes, watch.times(decode), bandwidth)


def _error(found: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    """The largest of |err|, and of 2^-8 (sum of p |v| + 1.01 |out|), where that ratio is largest: weights are rounded
    to BF16 for their product, and so is the result."""
    repeats = HEADS // KV_HEADS
    worst = (0.0, 1.0)
    for row, query in enumerate(q.double()):
        keys, values = (each[row].double().repeat_interleave(repeats, 1) for each in (k, v))
        weights = (torch.einsum("hd,thd->ht", query, keys) * HEAD**-0.5).softmax(-1)
        out, size = (torch.einsum("ht,thd->hd", weights, each) for each in (values, values.abs()))
        error, bound = (found[row].double() - out).abs(), 2**-8 * (size + 1.01 * out.abs())
        place = (error / bound).argmax()
        pair = error.flatten()[place].item(), bound.flatten()[place].item()
        worst = max(worst, pair, key=lambda each: each[0] / each[1])
    return worst


def _row(done: Measured, op: str, rows: int, length: int, size: int, times: dict[str, float], bandwidth: float) -> None:
    """size: the bytes that must be read and written."""
    what, rate = {"op": op, "rows": rows, "vocabulary or keys": length, "GB": size / 1e9}, size / times["us"] * 1e6
    done.row(what, {**times, "GB/s": rate / 1e9, "of copy": rate / bandwidth})
