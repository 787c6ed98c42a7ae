"""DeepGEMM's products against ours: whether their bits are ours, and both rates.

Its kernel sums each 128 of K from zero on the tensor core and adds it, scaled, in FP32, K ascending: our formula. Where
all bits are equal it may stand in for our kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_gemm
from fp8rl.numerics.kernels.products.tiles import make_tiles
from fp8rl.numerics.kernels.quantize import quantize_rows
from fp8rl.numerics.quantize import QuantizedTensor, quantize
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch, random
from lab.bench.gpu.products import BLOCKS, ROWS, record

ALIGNED = 128
"""Rows of an expert are a multiple of this, as DeepGEMM's grouped product has them."""


@dataclass(frozen=True)
class Library:
    """dense: a [T, K] @ b [N, K]^T. grouped: rows a [T, K] with matrices b [E, N, K], by each row's expert int32 [T].
    BF16."""

    dense: Callable[[QuantizedTensor, QuantizedTensor], Tensor]
    grouped: Callable[[QuantizedTensor, QuantizedTensor, Tensor], Tensor]


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    if importlib.util.find_spec("deep_gemm") is None:
        done.leave_out("DeepGEMM", "not installed: deep_gemm (the package sgl-deep-gemm)")
        return
    compare(done, sizes, watch, _deepgemm())


def compare(done: Measured, sizes: Sizes, watch: Stopwatch, library: Library) -> None:
    device = watch.device
    different = {"dense": 0, "grouped": 0}
    for shape in sizes.dense:
        codes = quantize(random(shape.n, shape.k, device=device, scale=0.02), BLOCKS)
        for tokens in sizes.tokens:
            rows = quantize_rows(random(tokens, shape.k, device=device), ROWS)
            sides = {
                "ours": lambda rows=rows, codes=codes: gemm(rows, codes, torch.bfloat16),
                "DeepGEMM": lambda rows=rows, codes=codes: library.dense(rows, codes),
            }
            different["dense"] += _compare(done, shape.name, tokens, shape.n * shape.k, sides, watch)
    for shape in sizes.experts:
        codes = quantize(random(shape.experts, shape.n, shape.k, device=device, scale=0.02), BLOCKS)
        for tokens in sizes.tokens:
            each = -(-tokens * shape.top_k // shape.experts // ALIGNED) * ALIGNED
            rows = quantize_rows(random(shape.experts * each, shape.k, device=device), ROWS)
            tiles = make_tiles(torch.full((shape.experts,), each, device=device), len(rows.data))
            expert = torch.arange(shape.experts, device=device, dtype=torch.int32).repeat_interleave(each)
            sides = {
                "ours": lambda r=rows, codes=codes, t=tiles: grouped_gemm(r, codes, t, torch.bfloat16),
                "DeepGEMM": lambda r=rows, codes=codes, expert=expert: library.grouped(r, codes, expert),
            }
            different["grouped"] += _compare(done, shape.name, len(expert), shape.n * shape.k, sides, watch)
    for kind, count in different.items():
        done.equal(f"numbers in which DeepGEMM's {kind} products are not ours", count)


def _compare(
    done: Measured, name: str, rows: int, size: int, sides: dict[str, Callable[[], Tensor]], watch: Stopwatch
) -> int:
    """How many numbers differ, of a product with `size` numbers in the weight."""
    ours, theirs = (side().view(torch.int16) for side in sides.values())
    count = int((ours != theirs).sum())
    done.row({"checked": name, "tokens": rows, "numbers": ours.numel(), "that differ": count})
    record(done, name, rows, 2.0 * rows * size, watch.side_by_side(sides, 3))
    return count


def _deepgemm() -> Library:
    import deep_gemm  # compiles a kernel for each shape when it is first called

    def dense(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        out = torch.empty(len(a.data), len(b.data), dtype=torch.bfloat16, device=a.data.device)
        deep_gemm.fp8_gemm_nt((a.data, a.scale_inv), (b.data, b.scale_inv), out)
        return out

    def grouped(a: QuantizedTensor, b: QuantizedTensor, expert: Tensor) -> Tensor:
        out = torch.empty(len(a.data), b.data.shape[1], dtype=torch.bfloat16, device=a.data.device)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a.data, a.scale_inv), (b.data, b.scale_inv), out, expert)
        return out

    return Library(dense, grouped)
