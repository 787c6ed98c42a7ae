"""The quantizers against the copy bandwidth; the products against cuBLAS in BF16 and torch's block-scaled FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8rl.numerics.kernels.norm import rms_norm_quantize
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_gemm, grouped_wgrad
from fp8rl.numerics.kernels.products.tiles import make_tiles
from fp8rl.numerics.kernels.quantize import quantize_blocks, quantize_columns, quantize_rows, quantize_rows_and_columns
from fp8rl.numerics.kernels.swiglu import swiglu_quantize
from fp8rl.numerics.quantize import QuantizedTensor, quantize
from fp8rl.numerics.spec import TensorSpec
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch, random
from lab.bench.measure import Result

ROWS, BLOCKS = TensorSpec(), TensorSpec(granularity="block")
LARGE = 4096
"""Tokens from which the bars of the products hold."""


def quantizers(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Bytes read and written per second of each quantizer, in parts of a plain copy's."""
    bandwidth = watch.copy_bandwidth()
    for tokens, features in sizes.quantized:
        x, wide = (random(tokens, width, device=watch.device) for width in (features, 2 * features))
        weight = x[0]
        kernels: dict[str, tuple[Callable[[], Any], float]] = {  # with the bytes of an element, scales included
            "rows 1x128": (lambda x=x: quantize_rows(x, ROWS), 3 + 4 / 128),
            "columns 1x128": (lambda x=x: quantize_columns(x, ROWS), 3 + 4 / 128),
            "rows and columns": (lambda x=x: quantize_rows_and_columns(x, ROWS, ROWS), 4 + 8 / 128),
            "blocks 128x128": (lambda x=x: quantize_blocks(x, BLOCKS), 3),
            "RMSNorm + rows": (lambda x=x, w=weight: rms_norm_quantize(x, w, 1e-6, ROWS), 3 + 4 / 128),
            "SwiGLU + rows": (lambda x=wide: swiglu_quantize(x, ROWS), 5 + 4 / 128),
        }
        for name, (run, size) in kernels.items():
            seconds = watch.seconds(run)
            rate = size * tokens * features / seconds
            what = {"kernel": name, "tokens": tokens, "features": features}
            done.row(what, {"GB/s": rate / 1e9, "of copy": rate / bandwidth})
    slowest = min(done.rows, key=lambda row: row["of copy"])
    parts = {"copy (GB/s)": bandwidth / 1e9}
    done.result(Result("quantizers / copy bandwidth (slowest)", slowest["of copy"], 0.85, True, parts))


def gemms(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Dense products of the forward, operands quantized beforehand."""
    device = watch.device
    for shape in sizes.dense:
        weight = random(shape.n, shape.k, device=device, scale=0.02)
        codes = quantize(weight, BLOCKS)
        for tokens in sizes.tokens:
            x = random(tokens, shape.k, device=device)
            rows = quantize_rows(x, ROWS)
            sides: dict[str, Callable[[], Any]] = {
                "BF16 cuBLAS": lambda x=x, w=weight: torch.mm(x, w.t()),
                "FP8": lambda rows=rows, codes=codes: gemm(rows, codes, torch.bfloat16),
                "FP8 with quantization": lambda x=x, codes=codes: gemm(quantize_rows(x, ROWS), codes, torch.bfloat16),
            }
            native = _scaled_mm(rows, codes, done)
            if native is not None:
                sides["FP8 torch._scaled_mm"] = native
            record(done, shape.name, tokens, 2.0 * tokens * shape.n * shape.k, watch.side_by_side(sides, 3))
    _judge(done, "FP8 block GEMM / cuBLAS BF16, exact", "FP8", 1.15)
    if any("FP8 torch._scaled_mm" in row for row in done.rows):
        _judge(done, "FP8 block GEMM / cuBLAS BF16, native (torch._scaled_mm)", "FP8 torch._scaled_mm", 1.4)


def grouped(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Products of experts: forward, and the gradient of the weights."""
    device = watch.device
    for shape in sizes.experts:
        weight = random(shape.experts, shape.n, shape.k, device=device, scale=0.02)
        codes = quantize(weight, BLOCKS)
        for tokens in sizes.tokens:
            x = random(tokens * shape.top_k, shape.k, device=device)
            dy = random(tokens * shape.top_k, shape.n, device=device)
            chosen = torch.randint(shape.experts, (len(x),), device=device)
            counts = torch.bincount(chosen, minlength=shape.experts)
            tiles, rows = make_tiles(counts, len(x)), quantize_rows(x, ROWS)
            columns = quantize_columns(dy, ROWS, tiles), quantize_columns(x, ROWS, tiles)
            sides: dict[str, Callable[[], Any]] = {
                "FP8": lambda rows=rows, codes=codes, tiles=tiles: grouped_gemm(rows, codes, tiles, torch.bfloat16),
                "FP8 wgrad": lambda c=columns, t=tiles, e=shape.experts: grouped_wgrad(*c, t, torch.bfloat16),
            }
            if hasattr(torch, "_grouped_mm") and device.type == "cuda":
                ends = counts.cumsum(0).int()
                sides["BF16 torch._grouped_mm"] = lambda x=x, w=weight, e=ends: torch._grouped_mm(
                    x, w.transpose(1, 2), offs=e
                )
            else:
                done.leave_out("BF16 grouped product", "torch._grouped_mm needs a GPU and a torch that has it")
            flops = 2.0 * len(x) * shape.n * shape.k
            record(done, shape.name, tokens, flops, watch.side_by_side(sides, 3))
        del weight, codes


def _scaled_mm(a: QuantizedTensor, b: QuantizedTensor, done: Measured) -> Callable[[], torch.Tensor] | None:
    """torch's product with 1x128 and 128x128 scales, where this torch and GPU have it."""
    scales = a.scale_inv.t().contiguous().t(), b.scale_inv.t()

    def run() -> torch.Tensor:
        return torch._scaled_mm(a.data, b.data.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)

    try:
        run()
    except (RuntimeError, ValueError, NotImplementedError) as error:  # a yardstick that not every torch offers
        done.leave_out("torch._scaled_mm with block scales", str(error).splitlines()[0][:200])
        return None
    return run


def record(done: Measured, name: str, tokens: int, flops: float, seconds: dict[str, float]) -> None:
    rates = {side: flops / value / 1e12 for side, value in seconds.items()}
    done.row({"product": name, "tokens": tokens}, rates)


def _judge(done: Measured, name: str, side: str, bar: float) -> None:
    """The slowest ratio from LARGE tokens on."""
    rows = [row for row in done.rows if row["tokens"] >= LARGE and side in row] or done.rows[-1:]
    slowest = min(rows, key=lambda row: row[side] / row["BF16 cuBLAS"])
    parts = {f"{side} (TFLOP/s)": slowest[side], "BF16 (TFLOP/s)": slowest["BF16 cuBLAS"]}
    done.result(Result(f"{name}: {slowest['product']}", slowest[side] / slowest["BF16 cuBLAS"], bar, True, parts))
