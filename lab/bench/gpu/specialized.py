"""FP8 products whose warps are specialised: a candidate for `fp8rl.numerics.kernels.products`, of the same bits.

Today's kernel multiplies and scales with all its warps in step, so the tensor core waits while they scale. Here one
group of warps brings tiles of both operands, and two groups each multiply 64 of a tile's 128 rows: one scales while the
other multiplies, and they wait for tiles alone. The instruction, m64n128k32, and the order of the sum are today's.

It has not run on a GPU. Until it has, no product uses it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fp8rl.numerics.kernels.products import gemm
from fp8rl.numerics.kernels.products.tiles import Tiles
from fp8rl.numerics.quantize import QuantizedTensor
from lab.bench.gpu import interpreter

SIZE, STAGES = gl.constexpr(128), gl.constexpr(5)
"""Rows, columns and depth of a tile, and tiles of each operand that are held or under way, in 160 KB."""
SHARING = gl.constexpr(8)
"""Tiles of rows that neighbouring programs work on."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def product(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, tiles: Tiles | None = None) -> Tensor:
    """Compute `gemm(a, b, dtype, tiles=tiles)`. tiles: of 128 rows."""
    left, right = gemm.check_operands(a, b, matrices=3 if tiles else 2)
    (rows, k), n = left.shape, right.shape[-2]
    out = torch.empty(rows, n, dtype=dtype, device=left.device)
    of_experts = (tiles.expert, tiles.first, tiles.rows, tiles.starts[-1:]) if tiles else (None,) * 4
    row_tiles = tiles.expert.numel() if tiles else -(-rows // SIZE.value)
    _run(row_tiles * -(-n // SIZE.value), a, b, out, *of_experts, None, rows, n, k)
    return out


def grouped_wgrad(dy_t: QuantizedTensor, x_t: QuantizedTensor, tiles: Tiles, dtype: torch.dtype) -> Tensor:
    """Compute `fp8rl.numerics.kernels.products.grouped.grouped_wgrad`."""
    left, right = gemm.check_operands(dy_t, x_t)
    n, k, experts = len(left), len(right), tiles.starts.numel() - 1
    out = torch.empty(experts, n, k, dtype=dtype, device=left.device)
    count = experts * -(-n // SIZE.value) * -(-k // SIZE.value)
    _run(count, dy_t, x_t, out, *(None,) * 4, tiles.starts, n, k, experts)
    return out


def _run(count: int, a: QuantizedTensor, b: QuantizedTensor, *args: Any) -> None:
    """Launch the kernel for so many tiles."""
    run = partial(interpreter.launch, _kernel) if triton.knobs.runtime.interpret else _kernel.run
    run(
        *(_describe(x.data.flatten(0, -2)) for x in (a, b)),
        *args,
        *gemm.scales(a, b, SIZE.value),
        BLOCKS=b.spec.granularity == "block",
        grid=(min(count, gemm.programs(a.data.device)),),
        warmup=False,
        num_warps=4,
    )


def _describe(x: Tensor) -> TensorDescriptor:
    plain = gemm.describe(x, SIZE.value, SIZE.value)
    return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, LAYOUT)


# Of a product, m, n and k are its rows, columns and depth. Of experts' gradients [N, K], m and n are N and K, k is the
# number of experts, and starts_ptr says which groups of 128 tokens are whose.
@gluon.jit(do_not_specialize=["m", "a_step", "b_row", "first_ptr", "rows_ptr"])
def _kernel(
    a_desc, b_desc, out_ptr, expert_ptr, first_ptr, rows_ptr, used_ptr, starts_ptr, m, n, k,
    a_scale_ptr, b_scale_ptr, a_row, a_step, b_matrix, b_row, b_step, BLOCKS: gl.constexpr,
):  # fmt: skip
    a_held = gl.allocate_shared_memory(a_desc.dtype, [STAGES, SIZE, SIZE], a_desc.layout)
    b_held = gl.allocate_shared_memory(b_desc.dtype, [STAGES, SIZE, SIZE], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)  # by both groups that multiply
    held = (a_held, b_held, full, free)
    tiles = (expert_ptr, first_ptr, rows_ptr, used_ptr, starts_ptr, m, n, k)
    scales = (a_scale_ptr, b_scale_ptr, a_row, a_step, b_matrix, b_row, b_step)
    gl.warp_specialize(
        [
            (_multiply, (held, tiles, scales, out_ptr, BLOCKS, 0)),
            (_multiply, (held, tiles, scales, out_ptr, BLOCKS, 1)),
            (_bring, (held, tiles, a_desc, b_desc)),
        ],
        [4, 4],
        [240, 24],  # registers of a thread; the first group has what is left, which is 240
    )


@gluon.jit
def _count(tiles):
    """Return the number of a launch's tiles."""
    expert_ptr, _, _, used_ptr, starts_ptr, m, n, k = tiles
    if starts_ptr is not None:
        count = gl.cdiv(m, SIZE) * gl.cdiv(n, SIZE) * k
    elif expert_ptr is not None:
        count = gl.load(used_ptr) * gl.cdiv(n, SIZE)
    else:
        count = gl.cdiv(m, SIZE) * gl.cdiv(n, SIZE)
    return count


@gluon.jit
def _place(tiles, place):
    """Return where a tile is: its expert, first row, rows and first column, and the steps of its sum."""
    expert_ptr, first_ptr, rows_ptr, used_ptr, starts_ptr, m, n, k = tiles
    column_tiles = gl.cdiv(n, SIZE)
    if starts_ptr is not None:  # an expert's gradient, whose steps are its tokens
        expert, within = place // (gl.cdiv(m, SIZE) * column_tiles), place % (gl.cdiv(m, SIZE) * column_tiles)
        first, column = within // column_tiles * SIZE, within % column_tiles * SIZE
        rows = gl.minimum(m - first, SIZE)
        begin, end = gl.load(starts_ptr + expert), gl.load(starts_ptr + expert + 1)
    else:
        row_tiles = gl.load(used_ptr) if expert_ptr is not None else gl.cdiv(m, SIZE)
        top = place // (SHARING * column_tiles) * SHARING
        shared = gl.minimum(row_tiles - top, SHARING)
        row_tile = top + place % (SHARING * column_tiles) % shared
        column = place % (SHARING * column_tiles) // shared * SIZE
        expert = gl.load(expert_ptr + row_tile) if expert_ptr is not None else 0
        first = gl.load(first_ptr + row_tile) if expert_ptr is not None else row_tile * SIZE
        rows = gl.load(rows_ptr + row_tile) if expert_ptr is not None else gl.minimum(m - first, SIZE)
        begin, end = 0, gl.cdiv(k, SIZE)
    return expert, first, rows, column, begin, end


@gluon.jit
def _bring(held, tiles, a_desc, b_desc):
    """Bring the tiles of both operands, each as soon as what was in its place has been multiplied."""
    a_held, b_held, full, free = held
    starts_ptr, n = tiles[4], tiles[6]
    step = 0
    for place in range(gl.program_id(0), _count(tiles), gl.num_programs(0)):
        expert, first, _, column, begin, end = _place(tiles, place)
        b_first = column if starts_ptr is not None else expert * n + column
        for depth in range(begin, end):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * SIZE * SIZE)
            tma.async_copy_global_to_shared(a_desc, [first, depth * SIZE], full.index(stage), a_held.index(stage))
            tma.async_copy_global_to_shared(b_desc, [b_first, depth * SIZE], full.index(stage), b_held.index(stage))
            step += 1


@gluon.jit
def _multiply(held, tiles, scales, out_ptr, BLOCKS: gl.constexpr, HALF: gl.constexpr):
    """Multiply the first or the second 64 rows of each tile, and store them."""
    a_held, b_held, full, free = held
    starts_ptr, m, n = tiles[4], tiles[5], tiles[6]
    a_scale_ptr, b_scale_ptr, a_row, a_step, b_matrix, b_row, b_step = scales
    HEIGHT: gl.constexpr = SIZE // 2
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 32])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    lane = HALF * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, SUM))
    across = gl.arange(0, SIZE, gl.SliceLayout(0, SUM))
    zero = gl.zeros([HEIGHT, SIZE], gl.float32, SUM)
    step = 0
    for place in range(gl.program_id(0), _count(tiles), gl.num_programs(0)):
        expert, first, rows, column, begin, end = _place(tiles, place)
        # Rows past the last one take its scale, and are not stored.
        a_scale = a_scale_ptr + (first + gl.minimum(lane, rows - 1)).to(gl.int64) * a_row
        b_scale = b_scale_ptr + gl.cast(expert, gl.int64) * b_matrix + column // (SIZE if BLOCKS else 1) * b_row
        acc = zero
        for depth in range(begin, end):
            stage = step % STAGES
            a_scales = gl.expand_dims(gl.load(a_scale + depth * a_step), 1)
            if BLOCKS:
                scale = a_scales * gl.load(b_scale + depth * b_step)
            else:
                scale = a_scales * gl.expand_dims(gl.load(b_scale + depth * b_step + across), 0)
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            a, b = a_held.index(stage).slice(HALF * HEIGHT, HEIGHT), b_held.index(stage).permute([1, 0])
            products = warpgroup_mma_wait(0, deps=[warpgroup_mma(a, b, zero, use_acc=False, is_async=True)])
            mbarrier.arrive(free.index(stage))
            scale, products = gl.broadcast(scale, products)
            acc = gl.fma(products, scale, acc)
            step += 1
        # A thread stores neighbouring columns, where it has summed every eighth pair.
        lanes = HALF * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, STORED))
        columns = column + gl.arange(0, SIZE, gl.SliceLayout(0, STORED))
        exists = gl.expand_dims(lanes < rows, 1) & gl.expand_dims(columns < n, 0)
        row = (first + lanes).to(gl.int64)
        if starts_ptr is not None:
            row += gl.cast(expert, gl.int64) * m
        where = gl.expand_dims(row * n, 1) + gl.expand_dims(columns, 0)
        gl.store(out_ptr + where, gl.convert_layout(acc.to(out_ptr.dtype.element_ty), STORED), mask=exists)
