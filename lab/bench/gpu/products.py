"""Quantizers against the copy bandwidth; products against cuBLAS in BF16, torch's block-scaled FP8 and DeepGEMM."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.kernels.gates import swiglu_quantize
from fp8rl.numerics.kernels.norm import rms_norm_quantize
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_wgrad
from fp8rl.numerics.kernels.products.operands import backward_operands
from fp8rl.numerics.kernels.products.tiles import make_tiles
from fp8rl.numerics.kernels.quantize import quantize_blocks, quantize_rows
from fp8rl.numerics.quantize import QuantizedTensor, quantize
from fp8rl.numerics.spec import QuantSpec, TensorSpec
from lab.bench.gpu import specialized
from lab.bench.gpu.measure import Measured, Shape, Sizes, Stopwatch, random
from lab.bench.measure import Result

ROWS, BLOCKS, POW2 = TensorSpec(), TensorSpec(granularity="block"), QuantSpec.preset("fp8_block_pow2")
LARGE = 4096
"""Tokens from which the bars of the products hold."""
ALIGNED = 128
"""Rows of an expert are a multiple of this, as DeepGEMM's grouped product has them."""


def quantizers(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Bytes read and written per second of each quantizer, in parts of a plain copy's."""
    bandwidth = watch.copy_bandwidth()
    for tokens, features in sizes.quantized:
        x, wide = (random(tokens, width, device=watch.device) for width in (features, 2 * features))
        weight = x[0]
        kernels: dict[str, tuple[Callable[[], Any], float]] = {  # with the bytes of an element, scales included
            "rows 1x128": (lambda x=x: quantize_rows(x, ROWS), 3 + 4 / 128),
            "operands of a backward": (lambda x=x: backward_operands(x, x, POW2), 7 + 12 / 128),
            "blocks 128x128": (lambda x=x: quantize_blocks(x, BLOCKS), 3),
            "RMSNorm + rows": (lambda x=x, w=weight: rms_norm_quantize(x, w, 1e-6, ROWS), 3 + 4 / 128),
            "SwiGLU + rows": (lambda x=wide: swiglu_quantize(x, ROWS), 5 + 4 / 128),
        }
        for name, (run, size) in kernels.items():
            times = watch.times(run)
            rate = size * tokens * features / times["us"] * 1e6
            what = {"kernel": name, "tokens": tokens, "features": features}
            done.row(what, {"GB/s": rate / 1e9, "of copy": rate / bandwidth, **times})
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
            _record(done, shape.name, tokens, 2.0 * tokens * shape.n * shape.k, sides, watch)
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
            columns = backward_operands(dy, x, POW2, tiles)[1:]
            sides: dict[str, Callable[[], Any]] = {
                "FP8": lambda rows=rows, codes=codes, tiles=tiles: gemm(rows, codes, torch.bfloat16, tiles=tiles),
                "FP8 wgrad": lambda c=columns, t=tiles, e=shape.experts: grouped_wgrad(*c, t, torch.bfloat16),
            }
            if hasattr(torch, "_grouped_mm") and device.type == "cuda":
                ends = counts.cumsum(0).int()
                sides["BF16 torch._grouped_mm"] = lambda x=x, w=weight, e=ends: torch._grouped_mm(
                    x, w.transpose(1, 2), offs=e
                )
            else:
                done.leave_out("BF16 grouped product", "torch._grouped_mm needs a GPU and a torch that has it")
            _record(done, shape.name, tokens, 2.0 * len(x) * shape.n * shape.k, sides, watch)
        del weight, codes


def candidates(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Products that may take the place of ours. Those of specialised warps need our bits; those of torch are for
    gradients alone, and need the same bits in two runs."""
    numbers, different = Counter[str](), Counter[str]()
    for shape in (*sizes.dense, *sizes.experts):
        for tokens in sizes.tokens[-2:]:
            of = _experts if shape.experts else _dense
            for product, (ours, specialised, torchs) in of(shape, tokens, done, watch.device).items():
                sides = {"FP8": ours, "specialized": specialised} | ({"torch": torchs} if torchs else {})
                for side, run in list(sides.items())[1:]:
                    found = run()
                    numbers[side] += found.numel()
                    different[side] += differ(found, ours() if side == "specialized" else run())
                flops = 2.0 * tokens * shape.top_k * shape.n * shape.k
                _record(done, f"{shape.name}, {product}", tokens, flops, sides, watch)
    done.equal("numbers of specialised warps that are not ours", different["specialized"], of=numbers["specialized"])
    if numbers["torch"]:
        done.equal("numbers of torch._scaled_mm that differ in two runs", different["torch"], of=numbers["torch"])


def differ(a: Tensor, b: Tensor) -> int:
    """How many numbers of two BF16 tensors have other bits."""
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


_Sides = tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[], Tensor] | None]
"""A product by our kernel, by specialised warps and, if it may be, by torch."""


def _dense(shape: Shape, tokens: int, done: Measured, device: torch.device) -> dict[str, _Sides]:
    weight = random(shape.n, shape.k, device=device, scale=0.02)
    x, dy = (random(tokens, width, device=device) for width in (shape.k, shape.n))
    rows, gradient = quantize_rows(x, ROWS), backward_operands(dy, x, POW2)
    codes, back = quantize(weight, BLOCKS), quantize(weight.t().contiguous(), BLOCKS)
    operands = {"forward": (rows, codes), "gradient of x": (gradient[0], back), "gradient of w": gradient[1:]}
    half = torch.bfloat16
    return {
        name: (
            partial(gemm, a, b, half),
            partial(specialized.product, a, b, half),
            None if name == "forward" else _scaled_mm(a, b, done),
        )
        for name, (a, b) in operands.items()
    }


def _experts(shape: Shape, tokens: int, done: Measured, device: torch.device) -> dict[str, _Sides]:
    codes = quantize(random(shape.experts, shape.n, shape.k, device=device, scale=0.02), BLOCKS)
    x, dy = (random(tokens * shape.top_k, width, device=device) for width in (shape.k, shape.n))
    counts = torch.bincount(torch.randint(shape.experts, (len(x),), device=device), minlength=shape.experts)
    tiles, rows, half = make_tiles(counts, len(x)), quantize_rows(x, ROWS), torch.bfloat16
    columns = backward_operands(dy, x, POW2, tiles)[1:]
    forward = partial(gemm, rows, codes, half, tiles=tiles), partial(specialized.product, rows, codes, half, tiles)
    gradient = (partial(product, *columns, tiles, half) for product in (grouped_wgrad, specialized.grouped_wgrad))
    return {"forward": (*forward, None), "gradient of w": (*gradient, None)}


def _scaled_mm(a: QuantizedTensor, b: QuantizedTensor, done: Measured) -> Callable[[], torch.Tensor] | None:
    """torch's product with 1x128 and 128x128 scales, where this torch and GPU have it."""
    try:
        scaled_mm(a, b)
    except (RuntimeError, ValueError, NotImplementedError) as error:  # a yardstick that not every torch offers
        done.leave_out("torch._scaled_mm with block scales", str(error).splitlines()[0][:200])
        return None
    return lambda: scaled_mm(a, b)


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """a [T, K] @ b [N, K]^T by torch, which takes the scales of a column of groups side by side."""
    columns = b.scale_inv.t().contiguous() if b.spec.granularity == "token_group" else b.scale_inv.t()
    scales = {"scale_a": a.scale_inv.t().contiguous().t(), "scale_b": columns}
    return torch._scaled_mm(a.data, b.data.t(), out_dtype=torch.bfloat16, **scales)


def _record(
    done: Measured, name: str, tokens: int, flops: float, sides: Mapping[str, Callable[[], Any]], watch: Stopwatch
) -> None:
    seconds = watch.side_by_side(sides, 3)
    rates = {side: flops / value / 1e12 for side, value in seconds.items()}
    for side, run in sides.items():
        rates |= {f"{side}, {column}": value for column, value in watch.beside(run, seconds[side]).items()}
    done.row({"product": name, "tokens": tokens}, rates)


def _judge(done: Measured, name: str, side: str, bar: float) -> None:
    """The slowest ratio from LARGE tokens on."""
    rows = [row for row in done.rows if row["tokens"] >= LARGE and side in row] or done.rows[-1:]
    slowest = min(rows, key=lambda row: row[side] / row["BF16 cuBLAS"])
    parts = {f"{side} (TFLOP/s)": slowest[side], "BF16 (TFLOP/s)": slowest["BF16 cuBLAS"]}
    done.result(Result(f"{name}: {slowest['product']}", slowest[side] / slowest["BF16 cuBLAS"], bar, True, parts))


Product = Callable[[QuantizedTensor, QuantizedTensor], Tensor]


@dataclass(frozen=True)
class Library:
    """Products of a library, in BF16."""

    dense: Product
    """a [T, K] @ b [N, K]^T."""
    grouped: Callable[[QuantizedTensor, QuantizedTensor, Tensor], Tensor]
    """Rows a [T, K] with matrices b [E, N, K], by each row's expert int32 [T]."""


def deepgemm(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """DeepGEMM's products against ours: whether their bits are ours, and both rates.

    Its kernel sums each 128 of K from zero on the tensor core and adds it, scaled, in FP32, K ascending: our formula.
    Where all bits are equal it may stand in for our kernels.
    """
    if importlib.util.find_spec("deep_gemm") is None:
        done.leave_out("DeepGEMM", "not installed: deep_gemm (the package sgl-deep-gemm)")
        return
    if watch.device.type == "cpu":
        done.leave_out("DeepGEMM", "it needs a GPU")
        return
    compare(done, sizes, watch, deepgemm_library())


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
                "ours": lambda r=rows, codes=codes, t=tiles: gemm(r, codes, torch.bfloat16, tiles=t),
                "DeepGEMM": lambda r=rows, codes=codes, expert=expert: library.grouped(r, codes, expert),
            }
            different["grouped"] += _compare(done, shape.name, len(expert), shape.n * shape.k, sides, watch)
    for kind, count in different.items():
        done.equal(f"numbers in which DeepGEMM's {kind} products are not ours", count)


def _compare(
    done: Measured, name: str, rows: int, size: int, sides: dict[str, Callable[[], Tensor]], watch: Stopwatch
) -> int:
    """Count the numbers that differ, of a product with `size` numbers in the weight."""
    ours, theirs = (side() for side in sides.values())
    count = differ(ours, theirs)
    done.row({"checked": name, "tokens": rows, "numbers": ours.numel(), "that differ": count})
    _record(done, name, rows, 2.0 * rows * size, sides, watch)
    return count


def deepgemm_library() -> Library:
    """DeepGEMM's, whose kernels are compiled for each shape when it is first called."""
    import deep_gemm

    def dense(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        out = torch.empty(len(a.data), len(b.data), dtype=torch.bfloat16, device=a.data.device)
        deep_gemm.fp8_gemm_nt((a.data, a.scale_inv), (b.data, b.scale_inv), out)
        return out

    def grouped(a: QuantizedTensor, b: QuantizedTensor, expert: Tensor) -> Tensor:
        out = torch.empty(len(a.data), b.data.shape[1], dtype=torch.bfloat16, device=a.data.device)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a.data, a.scale_inv), (b.data, b.scale_inv), out, expert)
        return out

    return Library(dense, grouped)
