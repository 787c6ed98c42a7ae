"""Quantizes to FP8 in groups and blocks of 128, with the bits of `numerics.quantize`.

Scales of neighbouring rows are contiguous (`scale_inv.stride(-2) == 1`), as Hopper's FP8 products load them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics import quantize as definitions
from fp8rl.numerics.backend.implementation import kernels_quantize_by
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.memory import numbered
from fp8rl.numerics.kernels.arithmetic import GROUP, absolute, as_rows, dense_rows, encode, inverse, scale_from_amax
from fp8rl.numerics.quantize import QuantizedTensor, scale_shape
from fp8rl.numerics.spec import TensorSpec

# A program holds 8 rows of 8 groups: 8 scales side by side fill one 32-byte sector of memory.
_ROWS, _GROUPS = 8, 8
_GROUP = GROUP.value


def quantize(x: Tensor, spec: TensorSpec) -> QuantizedTensor:
    """Compute `numerics.quantize.quantize`. Raises UserError for a granularity, group, scale or rounding that these
    kernels do not support."""
    definitions.check_quantizable(x, spec)
    _check_supported(spec)
    return quantize_blocks(x, spec) if spec.granularity == "block" else quantize_rows(x, spec)


def _check_supported(spec: TensorSpec) -> None:
    if not (spec.quantized and kernels_quantize_by(spec)):
        expected = (
            f"blocks or token groups of {_GROUP}, scales pow2 or fp32 and rounding to nearest, where the GPU "
            "kernels run"
        )
        raise user_error("quantization spec", spec, expected, "Use a preset, or a CPU.")


def quantize_rows(x: Tensor, spec: TensorSpec, out: QuantizedTensor | None = None) -> QuantizedTensor:
    """Quantize x [..., K] in groups of 128 along K -> codes [..., K], scales [..., ceil(K / 128)].

    out: contiguous tensors of these shapes to write to; None: new tensors.
    """
    rows = as_rows(x)
    total, k = rows.shape
    out = out or empty_rows(x.shape, spec, x.device)
    if x.numel():
        scales = out.scale_inv if out.scale_inv.dim() == 2 else out.scale_inv.reshape(total, -1)  # a view
        _rows_kernel[-(-total // _ROWS), -(-k // (_GROUPS * _GROUP))](
            *(rows, out.data, scales, total, k, rows.stride(0), *scales.stride()),
            **format_constants(spec),
            ROWS=_ROWS,
            GROUPS=_GROUPS,
            num_warps=4,
        )
    return out


def quantize_blocks(weight: Tensor, spec: TensorSpec, out: QuantizedTensor | None = None) -> QuantizedTensor:
    """Quantize weight [..., N, K] in blocks of 128 x 128 -> codes [..., N, K], scales [..., ceil(N / 128), ceil(K /
    128)].

    out: as in `quantize_rows`.
    """
    out = out or empty_blocks(weight.shape, spec, weight.device)
    _quantize_matrices([weight], [out])
    return out


def quantize_many(
    weights: Sequence[Tensor], spec: TensorSpec, outs: Sequence[QuantizedTensor] | None = None
) -> list[QuantizedTensor]:
    """Compute `numerics.quantize.quantize_many`. In blocks, all matrices of a dtype take one launch."""
    for weight in weights:
        definitions.check_quantizable(weight, spec)
    _check_supported(spec)
    if spec.granularity != "block" or len({weight.dtype for weight in weights}) != 1:
        given: Sequence[QuantizedTensor | None] = outs or [None] * len(weights)
        write = quantize_blocks if spec.granularity == "block" else quantize_rows
        return [write(weight, spec, out) for weight, out in zip(weights, given, strict=True)]
    made = list(outs) if outs is not None else [empty_blocks(w.shape, spec, w.device) for w in weights]
    _quantize_matrices(weights, made)
    return made


def quantize_both_ways(weights: Tensor, spec: TensorSpec) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantize weights [..., N, K] in blocks, and their transposes from the same load.

    Return codes [..., N, K] and [..., K, N], with scales [..., N / 128, K / 128] and [..., K / 128, N / 128]. Since
    blocks are square, the scales are the same numbers.
    """
    *stacks, n, k = weights.shape
    codes = empty_blocks(weights.shape, spec, weights.device)
    transposed = empty_blocks((*stacks, k, n), spec, weights.device)
    _quantize_matrices([weights], [codes], [transposed])
    return codes, transposed


def empty_rows(shape: Sequence[int], spec: TensorSpec, device: torch.device) -> QuantizedTensor:
    """Allocate a quantized tensor of this shape in groups along its last axis."""
    *lead, groups = scale_shape(shape, spec)
    scale_inv = torch.empty(groups, math.prod(lead), dtype=torch.float32, device=device).t()
    data = torch.empty(shape, dtype=spec.dtype, device=device)
    # A view gives the only row of a matrix another stride, and kernels of it another variant.
    return QuantizedTensor(data, scale_inv if len(lead) == 1 else scale_inv.view(*lead, groups), spec)


def empty_blocks(shape: Sequence[int], spec: TensorSpec, device: torch.device) -> QuantizedTensor:
    """Allocate quantized matrices [..., N, K] in blocks."""
    scale_inv = torch.empty(scale_shape(shape, spec), dtype=torch.float32, device=device)
    return QuantizedTensor(torch.empty(shape, dtype=spec.dtype, device=device), scale_inv, spec)


def _quantize_matrices(
    weights: Sequence[Tensor], outs: Sequence[QuantizedTensor], transposed: Sequence[QuantizedTensor] | None = None
) -> None:
    """Quantize the matrices of all weights [..., N, K] in one launch. Each weight and each out may be a stack."""
    kept: list[Tensor] = []
    rows: list[tuple[int, ...]] = []  # of the kernel's table, for the first matrix of each stack
    steps: list[tuple[int, ...]] = []  # from a matrix to the next
    for weight, out, other in zip(weights, outs, outs if transposed is None else transposed, strict=True):
        if not weight.numel():
            continue
        stack = dense_rows(weight).reshape(-1, *weight.shape[-2:])
        written = (out.data, out.scale_inv, other.data, other.scale_inv)
        assert all(x.is_contiguous() for x in written), "a copy would be written to"
        kept.append(stack)
        rows.append((*(x.data_ptr() for x in (stack, *written)), *stack.shape[1:], stack.stride(1)))
        steps.append((stack.stride(0) * stack.itemsize, *(x.nbytes // len(stack) for x in written), 0, 0, 0))
    if not rows:
        return
    stack_of, number = numbered(torch.tensor([len(stack) for stack in kept]))
    table = torch.tensor(rows)[stack_of] + number[:, None] * torch.tensor(steps)[stack_of]
    whole = not any(n % _GROUP or k % _GROUP or stride % 8 for *_, n, k, stride in rows)
    whole = whole and not any(at[i] % 16 for at in (*rows, *steps) for i in (0, 1, 3))  # not the scales' addresses
    # Blocks on the first axis of the grid: the second ends at 65,535, and a large matrix has more.
    _blocks_kernel[max(-(-n // _GROUP) * -(-k // _GROUP) for *_, n, k, _ in rows), len(table)](
        table.to(kept[0].device, non_blocking=True),
        **format_constants(outs[0].spec),
        WIDE=kept[0].dtype == torch.float32,
        WHOLE=whole,
        TRANSPOSED=transposed is not None,
        num_warps=8,
    )


def format_constants(spec: TensorSpec | None) -> dict[str, bool | float | None]:
    """Return a kernel's constants for the format that it quantizes to; a kernel that does not quantize ignores them."""
    if spec is not None:
        _check_supported(spec)
    return {
        "E5M2": spec is not None and spec.format == "e5m2",
        "POW2": spec is not None and spec.scale == "pow2",
        "FIXED": spec.fixed if spec is not None else None,
    }


@triton.jit(do_not_specialize=["rows", "scale_group"])
def _rows_kernel(
    x_ptr, codes_ptr, scale_ptr, rows, k, stride, scale_row, scale_group,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    column = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = (row < rows)[:, :, None] & (column < k)
    x = tl.load(x_ptr + row[:, :, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    codes, scale_inv = encode_groups(x, E5M2, POW2, FIXED, x_ptr.dtype.element_ty == tl.float32)
    tl.store(codes_ptr + row[:, :, None] * k + column, codes, mask=inside)
    where = scale_ptr + row * scale_row + group * scale_group
    tl.store(where, scale_inv, mask=(row < rows) & (group < tl.cdiv(k, GROUP)))


@triton.jit
def encode_groups(x, E5M2: tl.constexpr, POW2: tl.constexpr, FIXED: tl.constexpr, WIDE: tl.constexpr):
    """Quantize FP32 x [rows, groups, 128]. Return the codes, and the inverse scales [rows, groups]."""
    scale = scale_from_amax(tl.max(absolute(x), 2), E5M2, POW2, FIXED, WIDE)
    return encode(x * scale[:, :, None], E5M2), inverse(scale, POW2)


@triton.jit
def _blocks_kernel(
    table_ptr, E5M2: tl.constexpr, POW2: tl.constexpr, FIXED: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Quantize one block of one matrix. table: 8 numbers for each matrix: 5 addresses, N, K, and the stride of rows.

    WHOLE: all matrices consist of whole blocks and their rows begin at 16 bytes.
    """
    FP8: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    row_of_table = table_ptr + tl.program_id(1) * 8
    n, k, stride = tl.load(row_of_table + 5), tl.load(row_of_table + 6), tl.load(row_of_table + 7)
    down, across = tl.cdiv(n, GROUP), tl.cdiv(k, GROUP)
    place = tl.program_id(0)
    if place < down * across:
        w_ptr = tl.load(row_of_table).to(tl.pointer_type(tl.float32 if WIDE else tl.bfloat16))
        codes_ptr = tl.load(row_of_table + 1).to(tl.pointer_type(FP8))
        codes_t_ptr = tl.load(row_of_table + 3).to(tl.pointer_type(FP8))
        if WHOLE:
            n, k = tl.multiple_of(n, GROUP), tl.multiple_of(k, GROUP)
            stride = tl.multiple_of(stride, 8)
            w_ptr, codes_ptr = tl.multiple_of(w_ptr, 16), tl.multiple_of(codes_ptr, 16)
            codes_t_ptr = tl.multiple_of(codes_t_ptr, 16)
        first_row, first_column = place // across * GROUP, place % across * GROUP
        row = (first_row + tl.arange(0, GROUP))[:, None]
        column = (first_column + tl.arange(0, GROUP))[None, :]
        inside = (row < n) & (column < k)
        w = tl.load(w_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = scale_from_amax(tl.max(tl.max(absolute(w), 1), 0), E5M2, POW2, FIXED, WIDE)
        codes = encode(w * scale, E5M2)
        tl.store(codes_ptr + row * k + column, codes, mask=inside)
        tl.store(tl.load(row_of_table + 2).to(tl.pointer_type(tl.float32)) + place, inverse(scale, POW2))
        if TRANSPOSED:
            to = codes_t_ptr + tl.trans(column) * n + tl.trans(row)
            tl.store(to, tl.trans(codes), mask=(tl.trans(column) < k) & (tl.trans(row) < n))
            scale_t_ptr = tl.load(row_of_table + 4).to(tl.pointer_type(tl.float32))
            tl.store(scale_t_ptr + place % across * down + place // across, inverse(scale, POW2))
