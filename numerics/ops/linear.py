"""Matrix products: plain and FP8, whole and in slices of K.

A product is computed from operands that are exact in its compute dtype (BF16, or FP32 where scales are not powers of
two), by one call of the matrix library per K slice (and per block of rows, where it would not be row-invariant), and
rounded once. With `k_splits` > 1, each slice of K gives an FP32 partial and the partials are added in order: the
arithmetic of a row-parallel layer on that many ranks, so that a trainer with tensor parallelism and an engine without
it agree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from numerics.backend.dispatch import op
from numerics.fake_quantize import fake_quantize_columns, fake_quantize_rows
from numerics.ops.norm import rms_norm
from numerics.quantize import QuantizedTensor, quantize
from numerics.spec import QuantSpec, TensorSpec

Backward = Literal["fp8", "bf16"]

# Matrix libraries use other kernels, with another order of addition, below a few rows. Smaller products are padded.
FEWEST_ROWS = 16
# Some choose by the number of rows whatever it is (oneDNN with AMX): there, every call gets this many.
ROW_BLOCK = 64


@op
def weight_operand(quantized: QuantizedTensor, former: Any = None) -> Any:
    """A quantized weight [..., N, K] in the form that products take: here, what it dequantizes to.

    It is made once per weight version. Experts' matrices may be stacked: [experts, N, K].
    former: the operand of an earlier version of this weight, which nothing uses any more; its memory may be used again.
    """
    return quantized.dequantize(out=former)


@op
def trained_operand(weight: torch.Tensor, spec: TensorSpec) -> Any:
    """`weight_operand` of weight [N, K] quantized by `spec`. What its gradients need may be made in the same pass."""
    return weight_operand(quantize(weight, spec))


@op
def group_operand(weights: Sequence[torch.Tensor] | torch.Tensor, spec: TensorSpec) -> Any:
    """The experts' weights [N, K], or a stack of them, each quantized by `spec`, as grouped products take them."""
    return [quantize(weight, spec).dequantize() for weight in weights]


@op
def linear(x: torch.Tensor, weight: torch.Tensor, k_splits: int = 1) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T in x's dtype, unquantized."""
    if k_splits == 1:
        return _Product.apply(x, weight, weight, None, "bf16", x.dtype)
    slices = zip(x.chunk(k_splits, -1), weight.chunk(k_splits, -1), strict=True)
    return merge_partials([linear_partial(a, w) for a, w in slices], x.dtype)


@op
def linear_partial(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One K slice of `linear`: x [..., K/n], weight [N, K/n] -> FP32 [..., N]."""
    return _Product.apply(x, weight, weight, None, "bf16", torch.float32)


@op
def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    operand: Any,
    spec: QuantSpec,
    backward: Backward = "fp8",
    k_splits: int = 1,
) -> torch.Tensor:
    """The FP8 product of x [..., K] and a quantized weight, in x's dtype.

    weight [N, K] is the parameter, which receives the gradient; operand is its `trained_operand`
    (`WeightCache.operand`), or the `weight_operand` of its quantized form. x is quantized by `spec.activation` along K.
    backward: `fp8` quantizes dy along N for dgrad, and dy and x along the tokens for wgrad (TransformerEngine's
    Float8BlockScaling); `bf16` takes the gradient of the quantized forward with dy as it is (straight through).
    """
    if k_splits == 1:
        return _Product.apply(x, weight, operand, spec, backward, x.dtype)
    slices = zip(x.chunk(k_splits, -1), weight.chunk(k_splits, -1), operand.chunk(k_splits, -1), strict=True)
    return merge_partials([fp8_linear_partial(a, w, q, spec, backward) for a, w, q in slices], x.dtype)


@op
def fp8_linear_partial(
    x: torch.Tensor, weight: torch.Tensor, operand: Any, spec: QuantSpec, backward: Backward = "fp8"
) -> torch.Tensor:
    """One K slice of `fp8_linear`: FP32 [..., N]. A slice must hold whole quantization groups of K."""
    return _Product.apply(x, weight, operand, spec, backward, torch.float32)


@op
def norm_fp8_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    operand: Any,
    spec: QuantSpec,
    backward: Backward = "fp8",
) -> torch.Tensor:
    """`fp8_linear(rms_norm(x, norm_weight, eps), ...)`, in one op because a kernel need not store what is between."""
    return fp8_linear(rms_norm(x, norm_weight, eps), weight, operand, spec, backward)


def add_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """product [..., N] + bias [N], for None the product: a second rounding, behind that of the product.

    Megatron and SGLang's FP8 products add it so too, while a fused BF16 product of torch's rounds once. A row's sum
    does not depend on other rows, so there is nothing for a kernel of ours to fix.
    """
    return product if bias is None else _AddBias.apply(product, bias)


class _AddBias(torch.autograd.Function):
    """The bias's gradient is added up over all rows in FP32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.dtype = bias.dtype
        return (product.float() + bias.float()).to(product.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], grads[0].flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.dtype)


def merge_partials(partials: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """FP32 partials [..., N] added in the order given, rounded once to `dtype`."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total.to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] @ weight [N, K]^T -> [T, N], each row the same whatever T is. An FP32 result is not rounded to BF16."""
    rows = x.shape[0]
    if torch.float32 in (dtype, x.dtype, weight.dtype):
        x, weight = x.float(), weight.float()
    if chooses_by_rows(x.device, x.dtype):
        x = F.pad(x, (0, 0, 0, -rows % ROW_BLOCK))
        return torch.cat([torch.mm(block, weight.t()) for block in x.split(ROW_BLOCK)])[:rows].to(dtype)
    if 0 < rows < FEWEST_ROWS:
        x = F.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
    return torch.mm(x, weight.t())[:rows].to(dtype)


@functools.cache
def chooses_by_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine's matrix library gives a row other bits in a larger product, tried once per process."""
    generator = torch.Generator().manual_seed(0)

    def varies(k: int, n: int) -> bool:
        x, w = (torch.randn(rows, k, generator=generator).to(device, dtype) for rows in (1024, n))
        whole = torch.mm(x, w.t())
        return any(not torch.equal(torch.mm(x[:rows], w.t()), whole[:rows]) for rows in (16, 31, 64, 200))

    return any(varies(k, n) for k, n in ((512, 384), (2048, 512), (128, 256)))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_dq: torch.Tensor,
        spec: QuantSpec | None,
        backward: Backward,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        operand = rows if spec is None else fake_quantize_rows(rows, spec.activation)
        # An FP8 wgrad quantizes x anew, along the tokens; any other takes the operand of the forward.
        ctx.save_for_backward(rows if spec is not None and backward == "fp8" else operand, weight_dq)
        ctx.spec, ctx.shape = (spec if backward == "fp8" else None), x.shape
        ctx.dtype, ctx.weight_dtype = x.dtype, weight.dtype
        return product(operand, weight_dq, dtype).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        rows, weight_dq = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1]).to(rows.dtype)
        spec: QuantSpec | None = ctx.spec
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dy_rows = dy if spec is None else fake_quantize_rows(dy, spec.gradient)
            dx = wide_mm(dy_rows, weight_dq).reshape(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            if spec is not None:
                dy, rows = fake_quantize_columns(dy, spec.gradient), fake_quantize_columns(rows, spec.activation)
            dw = wide_mm(dy.t(), rows).to(ctx.weight_dtype)
        return dx, dw, None, None, None, None


def wide_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in the wider of the two dtypes; gradients need no fixed order."""
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    return torch.mm(a, b)


def add_weight_gradient(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """Add the weight gradient of some rows, dy [T, N] and x [T, K], to `total`, FP32 [N, K], without rounding it."""
    if dy.device.type == "cpu":  # has no product of BF16 matrices in FP32
        total.addmm_(dy.t().float(), x.float())
    else:
        total.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
