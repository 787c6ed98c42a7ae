"""Computes matrix products a @ b^T on Hopper's tensor cores: FP8 with block scales, and unquantized.

FP8: Hopper's FP8 instruction keeps about 14 bits of its sum. So it sums only the products of 128 of K, which share one
scale of each operand. That sum is scaled and added in FP32 on the ordinary cores, K ascending (as DeepGEMM does): acc =
fma(dot(a, b), a_scale * b_scale, acc). If K is cut into slices, their FP32 sums are added in order. A tile's width and
depth depend on the weight's shape and the dtypes alone. A tile has 128 rows, or 64 if FP8 rows are few (`tile_height`).

Laid out for an H200:
- FP8 tiles are 128 x 128 x 128 with 8 warps: a thread holds 64 numbers of the sum and 64 of the product. With 4 warps
  it would hold twice that and spill; smaller tiles read more from L2 than it delivers. If rows are few, L2 delivers
  enough, and tiles are 64 x 128 x 128 with 4 warps, two on an SM.
- The tensor memory accelerator brings both operands, along K, as FP8 instructions want them. It takes no registers or
  instructions for addresses, and gives zeros beyond the edges of a matrix, where other loads need masks.
- Scales are loaded before the product starts and arrive while it runs. The scales of a tile's rows should be contiguous
  (`scale_inv.stride(0) == 1`), since the threads of a warp hold neighbouring rows.
- One program per SM (two for short tiles) takes tile after tile. A tile's first loads start while the previous tile is
  finished, because at K = 2048 a tile has only 16 steps. Neighbouring programs share 8 tiles of rows, which stay in L2.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.kernels.arithmetic import GROUP, cast, dot
from fp8rl.numerics.kernels.products import deepgemm
from fp8rl.numerics.kernels.products.tiles import NARROW, TALL, WIDE, Tiles, tile_height, tile_width, warps
from fp8rl.numerics.quantize import QuantizedTensor

_SHARING = 8  # tiles of rows that neighbouring programs work on
_SHAPES = "Pass a [M, K] and b [N, K], or for sorted rows b [experts, N, K]."


def gemm(
    a: Any, b: Any, dtype: torch.dtype, k_splits: int = 1, plus: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Compute a [M, K] @ b [N, K]^T -> [M, N] in `dtype`, BF16 or FP32, accumulated in FP32 and rounded once.

    a: E4M3 or E5M2 in groups of 128 along K; b: likewise, or in blocks of 128 x 128. Or both are BF16, or both FP32 and
    multiplied in FP32. k_splits: the number of equal slices that K is cut into, each a multiple of 128 (64 in BF16).
    Their FP32 sums are added in ascending order. plus: [M, N], BF16 or FP32, is added to the sum before it is rounded.
    tiles: the tiles of rows that are sorted by expert; b is then [E, N, K], and a row is multiplied by its expert's
    matrix, with the bits of the product of the two alone. Rows that belong to no tile are not written.
    """
    left, right = check_operands(a, b, matrices=3 if tiles else 2)
    (rows, k), n = left.shape, right.shape[-2]
    if right.shape[-1] != k:
        raise user_error("product", f"{list(left.shape)} and {list(right.shape)}", "the same K", _SHAPES)
    width, depth, stages = 128, 128, 4  # a tile's, and steps of K under way, within 227 KB and 255 registers
    if left.dtype == torch.float32:
        width, depth, stages = 32, 32, 3
    elif left.dtype == torch.bfloat16:
        width = tile_width(n) if dtype == left.dtype and k_splits == 1 else NARROW
        depth, stages = 64, 3 if width == WIDE else 4
    if k % k_splits or (k_splits > 1 and k // k_splits % depth):
        remedy = "Use the trainer's tensor-parallel size, and choose one that does."
        raise user_error("k_splits", k_splits, f"a number that cuts K = {k} into equal multiples of {depth}", remedy)
    if plus is None and (done := deepgemm.product(a, b, dtype, k_splits, tiles)) is not None:
        return done
    out = torch.empty(rows, n, dtype=dtype, device=left.device)
    if not out.numel() or not k:
        return out.zero_()
    height = tiles.height if tiles else tile_height(rows) if isinstance(a, QuantizedTensor) else TALL
    row_tiles = tiles.expert.numel() if tiles else -(-rows // height)
    _product_kernel[min(row_tiles * -(-n // width), programs(out.device) * (TALL // height)),](
        *(describe(left, height, depth), describe(right.flatten(0, -2), width, depth), out, plus),
        *((tiles.expert, tiles.first, tiles.rows, tiles.starts[-1:]) if tiles else (None,) * 4),
        *(rows, n, k, k // k_splits // depth, *scales(a, b, width)),
        SCALES=b.spec.granularity if isinstance(b, QuantizedTensor) else "none",
        SPLIT=k_splits > 1,
        HEIGHT=height,
        WIDTH=width,
        DEPTH=depth,
        SHARING=_SHARING,
        num_warps=warps(height),
        num_stages=stages,
    )
    return out


def check_operands(a: Any, b: Any, matrices: int = 2) -> tuple[Tensor, Tensor]:
    """Return the data of operands that fit together: a matrix, and a matrix or a stack of them; all FP8, BF16 or
    FP32."""
    left, right = (x.data if isinstance(x, QuantizedTensor) else x for x in (a, b))
    if left.dim() != 2 or right.dim() != matrices:
        expected = f"2 and {matrices} dimensions"
        raise user_error("product", f"{list(left.shape)} and {list(right.shape)}", expected, _SHAPES)
    specs = [x.spec for x in (a, b) if isinstance(x, QuantizedTensor)]
    wanted = (("token_group",), ("block",) if matrices == 3 else ("token_group", "block"))
    plain = left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float32)
    scaled = all(s.group == GROUP.value and s.granularity in w for s, w in zip(specs, wanted, strict=False))
    if len(specs) == 1 or not (specs or plain) or not scaled:
        expected = "FP8 in groups of 128 times FP8 in blocks or groups of 128, or two BF16 or two FP32 tensors"
        remedy = "Choose these granularities in the quantization spec, or cast the operands."
        raise user_error("product", ", ".join(map(str, specs)) or f"{left.dtype}, {right.dtype}", expected, remedy)
    return left, right


def scales(a: Any, b: Any, width: int) -> tuple[Any, ...]:
    """Return the kernels' arguments for scales: a's, b's, a's strides (row, step), b's strides (matrix, row, step)."""
    if not isinstance(b, QuantizedTensor):
        return (None,) * 2 + (0,) * 5
    b_scale = b.scale_inv
    if b.spec.granularity == "token_group":
        b_scale = _side_by_side(b_scale, width)
    matrix, row, step = (0, *b_scale.stride())[-3:]
    return a.scale_inv, b_scale, *a.scale_inv.stride(), matrix, row, step


def _side_by_side(scale_inv: Tensor, width: int) -> Tensor:
    """Return scale_inv [N, groups] with neighbouring rows' scales side by side, and memory for whole tiles of rows."""
    rows, groups = scale_inv.shape
    if rows % width == 0 and scale_inv.stride(0) == 1:
        return scale_inv
    room = scale_inv.new_empty(groups, -(-rows // width) * width)
    room[:, :rows] = scale_inv.t()
    return room.t()


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe x [R, C] in blocks of rows x columns, for the tensor memory accelerator.

    The accelerator needs rows that begin at multiples of 16 bytes; an x with other rows is copied.
    """
    unit = 16 // x.element_size()
    if x.stride(1) != 1 or x.stride(0) < x.shape[1] or x.stride(0) % unit or x.data_ptr() % 16:
        room = x.new_empty(x.shape[0], -(-x.shape[1] // unit) * unit)
        x = room[:, : x.shape[1]].copy_(x)
    return TensorDescriptor.from_tensor(x, [rows, columns])


@functools.cache
def programs(device: torch.device) -> int:
    """Return the number of programs that share the tiles: one per SM. The interpreter runs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["m", "a_step", "slice_steps", "b_row", "first_ptr", "rows_ptr"])
def _product_kernel(
    a_desc, b_desc, out_ptr, plus_ptr, expert_ptr, first_ptr, rows_ptr, used_ptr, m, n, k, slice_steps,
    a_scale_ptr, b_scale_ptr, a_row, a_step, b_matrix, b_row, b_step,
    SCALES: tl.constexpr, SPLIT: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = expert_ptr is not None
    SPAN: tl.constexpr = GROUP if SCALES == "block" else 1  # rows of b that share a scale
    # A second sum leaves no registers for what one tile hands to the next.
    FLATTEN: tl.constexpr = not SPLIT
    row_tiles = tl.load(used_ptr) if TILES else tl.cdiv(m, HEIGHT)
    column_tiles = tl.cdiv(n, WIDTH)
    lane = tl.arange(0, HEIGHT)
    for place in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        top = place // (SHARING * column_tiles) * SHARING
        shared = tl.minimum(row_tiles - top, SHARING)
        row_tile = top + place % (SHARING * column_tiles) % shared
        column = place % (SHARING * column_tiles) // shared * WIDTH
        expert = tl.load(expert_ptr + row_tile) if TILES else 0
        first = tl.load(first_ptr + row_tile) if TILES else row_tile * HEIGHT
        rows = tl.load(rows_ptr + row_tile) if TILES else tl.minimum(m - first, HEIGHT)
        a_scale, b_scale = a_scale_ptr, b_scale_ptr
        if SCALES != "none":
            # Rows past the last one take its scale, and are not stored.
            a_scale += (first + tl.minimum(lane, rows - 1)).to(tl.int64)[:, None] * a_row
            b_scale += tl.cast(expert, tl.int64) * b_matrix + column // SPAN * b_row
        total = sum_products(
            a_desc, b_desc, first, expert * n + column, 0, tl.cdiv(k, DEPTH), slice_steps,
            a_scale, b_scale, a_step, b_step, SCALES, SPLIT, HEIGHT, WIDTH, DEPTH,
        )  # fmt: skip
        columns = column + tl.arange(0, WIDTH)
        where = (first + lane).to(tl.int64)[:, None] * n + columns[None, :]
        exists = (lane < rows)[:, None] & (columns < n)[None, :]
        if plus_ptr is not None:
            total += tl.load(plus_ptr + where, mask=exists, other=0.0).to(tl.float32)
        tl.store(out_ptr + where, cast(total, out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def sum_products(
    a_desc, b_desc, a_first, b_first, begin, end, slice_steps, a_scale, b_scale, a_step, b_step,
    SCALES: tl.constexpr, SPLIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return a's rows from a_first times b's rows from b_first, FP32 [HEIGHT, WIDTH], over steps begin to end of K.

    a_scale points to the first step's scales of a's rows, [HEIGHT, 1], b_scale to the scale of b's first row or block.
    """
    acc = tl.zeros((HEIGHT, WIDTH), tl.float32)
    total = tl.full((HEIGHT, WIDTH), -0.0, tl.float32)  # to which a first slice is added unchanged
    for step in range(begin, end):
        a = a_desc.load([a_first, step * DEPTH])
        b = b_desc.load([b_first, step * DEPTH])
        if SCALES == "none":
            if a.dtype == tl.float32:
                acc = tl.dot(a, b.T, acc, input_precision="ieee")
            else:
                acc = dot(a, b.T, acc)
        else:
            b_scales = b_scale + step * b_step
            if SCALES == "token_group":
                b_scales += tl.arange(0, WIDTH)[None, :]
            scale = tl.load(a_scale + step * a_step) * tl.load(b_scales)
            acc = tl.fma(tl.dot(a, b.T), tl.broadcast_to(scale, (HEIGHT, WIDTH)), acc)
        if SPLIT:
            if (step + 1) % slice_steps == 0:
                total += acc
                acc = tl.zeros((HEIGHT, WIDTH), tl.float32)
    return total if SPLIT else acc
