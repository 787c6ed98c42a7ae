"""Has the one quantizer of the project. Trainer forward and backward, weight sync and converters call it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.backend.compiler import compilable
from fp8rl.numerics.backend.dispatch import op
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.memory import copy_all
from fp8rl.numerics.rounding import fp8_max, group_amax, round_stochastically, round_to_grid, scale_from_amax
from fp8rl.numerics.spec import Scale, TensorSpec

# Fake quantization of activations and gradients on the way into a GEMM: the values after storing them in FP8.
#
# The values equal `quantize(x, spec).dequantize()`. Every step quantizes BF16 rows in token groups, with scales
# that are powers of two, to nearest. This case has no FP8 casts, which are slow on a CPU. All other cases take the
# general quantizer.


def fake_quantize_rows(x: Tensor, spec: TensorSpec) -> Tensor:
    """Quantize x [T, K] along K: the operand of fprop and dgrad. Return [T, K] in `spec.dequantized_dtype`."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec) and x.shape[1] % spec.group == 0:
        return _of_groups(x.reshape(-1, spec.group), spec).view(x.shape)
    return fake_quantize(x, spec)


def fake_quantize_columns(x: Tensor, spec: TensorSpec) -> Tensor:
    """Quantize x [T, K] along the tokens: an operand of wgrad, which sums over them. Return [T, K]."""
    if not spec.quantized or x.numel() == 0:
        return x
    if _is_fast(x, spec):
        tokens = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -tokens % spec.group))
        return _of_groups(padded.unflatten(0, (-1, spec.group)), spec).flatten(0, 1)[:tokens]
    return fake_quantize(x.t().contiguous(), spec).t()


def _is_fast(x: Tensor, spec: TensorSpec) -> bool:
    grouped = spec.granularity == "token_group" and spec.rounding == "nearest"
    return grouped and spec.scale != "fp32" and x.dtype == torch.bfloat16


def _of_groups(x: Tensor, spec: TensorSpec) -> Tensor:
    """Quantize x in groups along axis 1."""
    return _round(x, *_scales(x, 1, spec.dtype, spec.scale, spec.fixed), spec.dtype)


@compilable
def _scales(x: Tensor, dim: int, dtype: torch.dtype, kind: Scale, fixed: float | None) -> tuple[Tensor, Tensor]:
    """Return scale and inverse scale, FP32, of each group of x along `dim`, which is kept with size 1.

    It is a function of its own because a compiler that fuses it with `_round` computes the scale for every element.
    """
    scale = scale_from_amax(group_amax(x, (dim,), fixed), dtype, kind, x.dtype)
    return scale, 1.0 / scale


@compilable
def _round(x: Tensor, scale: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Round BF16 x to the FP8 grid under its scales, BF16."""
    return (round_to_grid(x.float() * scale, dtype) * scale_inv).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """An FP8 tensor and its scales."""

    data: Tensor
    """FP8, in the shape of the tensor that was quantized."""
    scale_inv: Tensor
    """FP32 factors, one per block, that dequantize `data` (the convention of HF checkpoints). The shape is [...,
    ceil(rows / block rows), ceil(columns / block columns)]. E8M0 scales are in torch's float8_e8m0fnu."""
    spec: TensorSpec
    """The spec that the tensor was quantized by."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale_inv.nbytes

    def chunk(self, slices: int, axis: int) -> list[QuantizedTensor]:
        """Return views of equal slices along an axis. A slice must hold whole groups."""
        parts = zip(self.data.chunk(slices, axis), self.scale_inv.chunk(slices, axis), strict=True)
        return [QuantizedTensor(data, scale_inv, self.spec) for data, scale_inv in parts]

    def transposed(self) -> QuantizedTensor:
        """Return a copy [..., columns, rows]. Blocks must be square."""
        data = self.data.view(torch.uint8).transpose(-1, -2).contiguous().view(self.data.dtype)
        return QuantizedTensor(data, self.scale_inv.transpose(-1, -2).contiguous(), self.spec)

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """Return data * scale_inv in FP32, rounded once to `dtype` (default: the narrowest that is exact for the spec).

        out: contiguous, of data's shape, to write into; it is returned. New memory takes longer to get than to fill.
        """
        matrix = _as_matrices(self.data, self.spec)
        blocks = _to_blocks(matrix, self.spec)
        scale = self.scale_inv.reshape(blocks.shape[0], 1, blocks.shape[2], 1)
        if out is not None:
            if blocks.numel() == self.data.numel():  # no ragged edges: `out` has the same blocks
                _write_scaled(blocks, scale, out.view(blocks.shape))
                return out
            return out.copy_(self.dequantize(out.dtype))
        values = _scaled(blocks, scale, dtype or self.spec.dequantized_dtype)
        return _from_blocks(values, matrix.shape).reshape(self.data.shape)


NamedWeight = tuple[str, Tensor | QuantizedTensor]
"""A weight with its name in the checkpoint. It may be quantized already."""


@op
def quantize(x: Tensor, spec: TensorSpec) -> QuantizedTensor:
    """Quantize a BF16 or FP32 tensor [..., rows, columns], saturating.

    A block of zeros has scale_inv 1. NaN is left out of a block's amax and stays NaN (of either sign). An infinite
    value makes the scale 1, and saturates. With a static range all scales are alike whatever the values. Blocks at
    ragged edges are smaller; nothing is padded in the result.
    Raises `UserError` for a spec that does not quantize, or for a dtype or shape that cannot be quantized.
    """
    return quantize_by(x, spec, block_amax(x, spec))


def block_amax(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return each block's amax, from which its scale is computed: its largest |x|, or the static range.

    FP32, in the shape of `scale_inv`. If several ranks hold parts of a block, its amax is the largest of the ranks'.
    """
    check_quantizable(x, spec)
    blocks = _to_blocks(_as_matrices(x, spec), spec)
    return _block_amax(blocks, spec.fixed).reshape(scale_shape(x.shape, spec))


def quantize_by(x: Tensor, spec: TensorSpec, amax: Tensor) -> QuantizedTensor:
    """Compute `quantize` with scales from the given `block_amax`."""
    matrix = _as_matrices(x, spec)
    blocks = _to_blocks(matrix, spec)
    scale = scale_from_amax(amax, spec.dtype, spec.scale, x.dtype)
    encode = _encode if spec.rounding == "nearest" else _encode_stochastically
    codes = encode(blocks, scale.reshape(blocks.shape[0], 1, blocks.shape[2], 1), spec.dtype)
    data = _from_blocks(codes, matrix.shape).reshape(x.shape)
    return QuantizedTensor(data, (1.0 / scale).to(spec.scale_dtype), spec)


@op
def quantize_many(
    weights: Sequence[Tensor], spec: TensorSpec, outs: Sequence[QuantizedTensor] | None = None
) -> list[QuantizedTensor]:
    """Compute `quantize` of each tensor or stack of them. The kernel needs one launch for all.

    outs: results to write into, of the right shapes and dtypes and with contiguous data; they are returned.
    """
    found = [quantize(weight, spec) for weight in weights]
    if outs is None:
        return found
    copy_all(*([part for each in one for part in (each.data, each.scale_inv)] for one in (outs, found)))
    return list(outs)


def check_quantizable(x: Tensor, spec: TensorSpec) -> None:
    """Raise `UserError` for a spec that does not quantize, or for a dtype or shape that cannot be quantized."""
    if not spec.quantized:
        raise UserError("quantize: found a bf16 tensor spec, expected an FP8 one; do not quantize this tensor")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise UserError(f"quantize: found a {x.dtype} tensor, expected bfloat16 or float32")
    if x.dim() < 1 or (spec.granularity == "block" and x.dim() < 2):
        raise UserError(f"quantize: found the shape {tuple(x.shape)}, expected a matrix for {spec.granularity} scales")


def scale_shape(shape: Sequence[int], spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of the `scale_inv` of a tensor of this shape."""
    if spec.granularity == "tensor":
        return (1, 1)
    blocks = -(-shape[-1] // spec.block_shape(1, shape[-1])[1])
    if spec.granularity == "block":
        return (*shape[:-2], -(-shape[-2] // spec.group), blocks)
    return (*shape[:-1], blocks)


def fake_quantize(x: Tensor, spec: TensorSpec, dtype: torch.dtype | None = None) -> Tensor:
    """Return dequantize(quantize(x)), the values of a tensor that was stored in the spec's format.

    A bf16 spec returns x unchanged. `dtype` defaults to the narrowest that is exact for the spec.
    """
    return quantize(x, spec).dequantize(dtype) if spec.quantized else x


@compilable
def _block_amax(blocks: Tensor, fixed: float | None) -> Tensor:
    return group_amax(blocks, (1, 3), fixed)


@compilable
def _encode(blocks: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = fp8_max(dtype)
    # The cast to e5m2 overflows to infinity instead of saturating, hence the clamp.
    return (blocks.float() * scale).clamp(-limit, limit).to(dtype)


@compilable
def _encode_stochastically(blocks: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    across, columns = blocks.shape[2:]
    column = torch.arange(across * columns, device=blocks.device).reshape(1, 1, across, columns)
    return round_stochastically(blocks.float() * scale, column, dtype).to(dtype)


@compilable
def _scaled(blocks: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (blocks.float() * scale.float()).to(dtype)


@compilable
def _write_scaled(blocks: Tensor, scale: Tensor, out: Tensor) -> None:
    out.copy_(blocks.float() * scale.float())


def _as_matrices(x: Tensor, spec: TensorSpec) -> Tensor:
    """Fold leading dimensions into rows, unless blocks span rows."""
    return x if spec.granularity == "block" else x.reshape(-1, x.shape[-1])


def _to_blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """Cut [..., R, C] into [rows of blocks, r, C/c, c], padded with zeros, which change no amax.

    The result has four axes whatever the tensor has, so that fewer variants are compiled.
    """
    rows, columns = x.shape[-2:]
    r, c = spec.block_shape(rows, columns)
    if rows % r or columns % c:
        edges = (0, -columns % c, 0, -rows % r)
        # float8 tensors cannot be padded, their bytes can.
        x = F.pad(x.view(torch.uint8), edges).view(x.dtype) if x.itemsize == 1 else F.pad(x, edges)
    return x.reshape(x.shape[:-1].numel() // r, r, x.shape[-1] // c, c)


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_to_blocks`, without the padding; contiguous."""
    rows, columns = shape[-2:]
    _, r, across, c = blocks.shape
    whole = blocks.reshape(*shape[:-2], -(-rows // r) * r, across * c)
    return whole[..., :rows, :columns].contiguous()
