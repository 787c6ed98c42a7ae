"""Defines matrix products: plain and FP8, whole and in slices of K.

Operands are exact in the compute dtype: BF16, or FP32 if scales are not powers of two, or if the machine multiplies
BF16 slowly. The matrix library is called once for each slice of K, and for each block of rows if it would not be
row-invariant. The result is rounded once. With `k_splits` > 1 each slice of K gives an FP32 partial, and the partials
are added in order. A row-parallel layer on that many ranks computes the same. So a trainer with tensor parallelism and
an engine without it agree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.backend.dispatch import op
from fp8rl.numerics.ops.norm import rms_norm
from fp8rl.numerics.quantize import QuantizedTensor, fake_quantize_columns, fake_quantize_rows, quantize
from fp8rl.numerics.spec import QuantSpec, TensorSpec

Backward = Literal["fp8", "bf16"]

# Matrix libraries use other kernels, with another order of addition, below a few rows. Smaller products are padded.
FEWEST_ROWS = 16
# So does MKL's FP32 product below 12 columns: the parts of a matrix that ranks divide would not have the bits of it.
FEWEST_COLUMNS = 16
# Some choose by the number of rows whatever it is (oneDNN with AMX): there, every call gets this many.
ROW_BLOCK = 64


@op
def weight_operand(quantized: QuantizedTensor, former: Any = None) -> Any:
    """Return a quantized weight [..., N, K] in the form that products take. This definition dequantizes it.

    It is made once per weight version. Experts' matrices may be stacked: [experts, N, K]. former: the operand of an
    earlier version of this weight, which nothing uses any more; its memory may be used again.
    """
    return quantized.dequantize(out=former)


def dense(operand: Any) -> Tensor:
    """Return the matrix that a product multiplies with: the operand itself, or its codes, dequantized again."""
    return operand if isinstance(operand, Tensor) else operand.dequantized()


@op
def trained_operand(weight: Tensor, spec: TensorSpec) -> Any:
    """Return the `weight_operand` of weight [N, K], or of experts' [experts, N, K], quantized by `spec`, with what its
    gradients need."""
    return weight_operand(quantize(weight, spec))


@op
def linear(x: Tensor, weight: Tensor, k_splits: int = 1, plus: Tensor | None = None) -> Tensor:
    """Compute x [..., K] @ weight [N, K]^T in x's dtype, unquantized.

    plus [..., N], in x's dtype, is added to the FP32 sum before it is rounded.
    """
    if k_splits == 1:
        return _Product.apply(x, weight, weight, None, "bf16", x.dtype, plus)
    return merge_partials(partial_sums(k_splits, x, weight), x.dtype, plus)


@op
def linear_partial(x: Tensor, weight: Tensor) -> Tensor:
    """Compute one K slice of `linear`: x [..., K/n], weight [N, K/n] -> FP32 [..., N]."""
    return _Product.apply(x, weight, weight, None, "bf16", torch.float32, None)


@op
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    operand: Any,
    spec: QuantSpec,
    backward: Backward = "fp8",
    k_splits: int = 1,
    plus: Tensor | None = None,
) -> Tensor:
    """Compute the FP8 product of x [..., K] and a quantized weight, in x's dtype; plus as in `linear`.

    weight [N, K] is the parameter, which receives the gradient; operand is its `trained_operand`
    (`WeightCache.operand`), the `weight_operand` of its quantized form, or its `Frozen`. x is quantized by
    `spec.activation` along K. backward: `fp8` quantizes dy along N for dgrad, and dy and x along the tokens for wgrad
    (TransformerEngine's Float8BlockScaling); `bf16` takes the gradient of the quantized forward with unquantized dy
    (straight through).
    """
    if k_splits == 1:
        return _Product.apply(x, weight, operand, spec, backward, x.dtype, plus)
    return merge_partials(partial_sums(k_splits, x, weight, operand, spec, backward), x.dtype, plus)


@op
def fp8_linear_partial(x: Tensor, weight: Tensor, operand: Any, spec: QuantSpec, backward: Backward = "fp8") -> Tensor:
    """Compute one K slice of `fp8_linear`: FP32 [..., N]. A slice must hold whole quantization groups of K."""
    return _Product.apply(x, weight, operand, spec, backward, torch.float32, None)


def partial_sums(
    slices: int, x: Tensor, weight: Tensor, operand: Any = None, spec: Any = None, backward: Backward = "fp8"
) -> list[Tensor]:
    """Compute the partial of each of `slices` equal slices of K, in order: FP32 [..., N] each. An operand of None is of
    an unquantized weight."""
    a, w, q = ([each] if slices == 1 or each is None else each.chunk(slices, -1) for each in (x, weight, operand))
    if operand is None:
        return list(map(linear_partial, a, w))
    return [fp8_linear_partial(*cut, spec, backward) for cut in zip(a, w, q, strict=True)]


def stacked(partials: list[Tensor]) -> Tensor:
    """Stack partials for ranks to exchange: [slices, ..., N]. A single one is not copied."""
    return torch.stack(partials) if len(partials) > 1 else partials[0][None]


@op
def norm_fp8_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    operand: Any,
    spec: QuantSpec,
    backward: Backward = "fp8",
) -> Tensor:
    """Compute `fp8_linear(rms_norm(x, norm_weight, eps), ...)`. One op, so that a kernel need not store the norm."""
    return fp8_linear(rms_norm(x, norm_weight, eps), weight, operand, spec, backward)


@op
def rows_linear(rows: Any, operand: Any, dtype: torch.dtype, plus: Tensor | None = None) -> Tensor:
    """Compute `fp8_linear` of rows that are quantized already, as `norm_rows` gives them. No gradient.

    operand: the `weight_operand` of a weight [N, K]. Returns [T, N] in `dtype`, BF16 or FP32; plus as in `linear`.
    """
    return product(rows, dense(operand), dtype, plus)


def add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias [N] to product [..., N], which is rounded already, and round again. None: return the product.

    Megatron and SGLang's FP8 products do the same; a fused BF16 product of torch's rounds once. A row's sum does not
    depend on other rows, so it needs no kernel of ours.
    """
    return product if bias is None else _AddBias.apply(product, bias)


class _AddBias(torch.autograd.Function):
    """Adds a bias. The bias's gradient is added up over all rows in FP32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return (product.float() + bias.float()).to(product.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.dtype)


def merge_partials(partials: Sequence[Tensor], dtype: torch.dtype, plus: Tensor | None = None) -> Tensor:
    """Add FP32 partials [..., N] in the order given, and then plus [..., N]; round once to `dtype`."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return (total if plus is None else total + plus).to(dtype)


def product(x: Tensor, weight: Tensor, dtype: torch.dtype, plus: Tensor | None = None) -> Tensor:
    """Compute x [T, K] @ weight [N, K]^T -> [T, N], each row the same whatever T is. An FP32 result is not rounded to
    BF16.

    plus [T, N], BF16, is added to the FP32 sum, which is rounded once.
    """
    rows, columns = x.shape[0], weight.shape[0]
    x, weight = (x.float(), weight.float()) if dtype == torch.float32 else widened(x, weight)
    if columns < FEWEST_COLUMNS and not multiplies_bf16(x.device.type):
        weight = F.pad(weight, (0, 0, 0, FEWEST_COLUMNS - columns))
        plus = None if plus is None else F.pad(plus, (0, FEWEST_COLUMNS - columns))
    height = ROW_BLOCK if chooses_by_rows(x.device, x.dtype) else filled_up(rows)
    if missing := -rows % height:
        x = F.pad(x, (0, 0, 0, missing))
        plus = None if plus is None else F.pad(plus, (0, 0, 0, missing))
    if len(x) <= height:
        return _mm(x, plus, weight)[:rows, :columns].to(dtype)
    blocks = x.split(height)
    more = [None] * len(blocks) if plus is None else plus.split(height)
    found = torch.cat([_mm(*block, weight) for block in zip(blocks, more, strict=True)])
    return found[:rows, :columns].to(dtype)


def filled_up(rows: int) -> int:
    """Return for how many rows a product of `rows` rows is computed: one of few numbers, because oneDNN makes a kernel
    for each, which takes longer than a small product."""
    step = min(max(FEWEST_ROWS, 1 << rows.bit_length() >> 3), 128)
    return max(-(-rows // step) * step, FEWEST_ROWS)


def _mm(x: Tensor, plus: Tensor | None, weight: Tensor) -> Tensor:
    """Call the matrix library once. It adds `plus` to its FP32 sum of BF16 matrices. Its FP32 result gets it here."""
    if plus is None:
        return torch.mm(x, weight.t())
    return torch.addmm(plus, x, weight.t()) if x.dtype == plus.dtype else torch.mm(x, weight.t()) + plus


@functools.cache
def chooses_by_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this machine's matrix library gives a row other bits in a larger product. Tried once a process."""
    generator = torch.Generator().manual_seed(0)

    def varies(k: int, n: int) -> bool:
        x, w = widened(*(torch.randn(rows, k, generator=generator).to(device, dtype) for rows in (1024, n)))
        both = [(matrix, torch.mm(x, matrix)) for matrix in (w.t(), w.t().contiguous())]  # forward and gradient
        return any(not torch.equal(torch.mm(x[:m], b), whole[:m]) for b, whole in both for m in (16, 48, 64, 224))

    return any(varies(k, n) for k, n in ((512, 384), (2048, 512), (128, 256)))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        held: Any,
        spec: QuantSpec | None,
        backward: Backward,
        dtype: torch.dtype,
        plus: Tensor | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        operand = rows if spec is None else fake_quantize_rows(rows, spec.activation)
        # An FP8 wgrad quantizes x again, along the tokens; any other takes the operand of the forward.
        kept = rows if spec is not None and backward == "fp8" else operand
        ctx.frozen = None if isinstance(held, Tensor) else held
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, held if ctx.frozen is None else None)
        ctx.spec, ctx.shape = (spec if backward == "fp8" else None), x.shape
        ctx.dtype, ctx.kept_dtype, ctx.weight_dtype = x.dtype, kept.dtype, weight.dtype
        more = None if plus is None else plus.reshape(-1, weight.shape[0])
        return product(operand, dense(held), dtype, more).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1]).to(ctx.kept_dtype)
        spec: QuantSpec | None = ctx.spec
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dy_rows = dy if spec is None else fake_quantize_rows(dy, spec.gradient)
            dx = wide_mm(dy_rows, weight if ctx.frozen is None else dense(ctx.frozen)).reshape(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            if spec is not None:
                dy, rows = fake_quantize_columns(dy, spec.gradient), fake_quantize_columns(rows, spec.activation)
            dw = wide_mm(dy.t(), rows).to(ctx.weight_dtype)
        return dx, dw, None, None, None, None, grads[0] if ctx.needs_input_grad[6] else None


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b in the wider of the two dtypes; gradients need no fixed order."""
    return torch.mm(*widened(a, b)).to(a.dtype if a.dtype == b.dtype else torch.float32)


def widened(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices in the dtype in which they are multiplied: BF16 if both are, and the machine is fast at it,
    else FP32. Sums are in FP32 in either."""
    narrow = a.dtype == b.dtype and (a.dtype != torch.bfloat16 or multiplies_bf16(a.device.type))
    return (a, b) if narrow else (a.float(), b.float())


@functools.cache
def multiplies_bf16(device: str) -> bool:
    """Return whether the matrix library has fast products of BF16 matrices. On CPUs without AVX-512 torch has plain
    loops, which take 10 to 30 times as long as FP32 products."""
    return device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def add_weight_gradient(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add the weight gradient of some rows, dy [T, N] and x [T, K], to `total`, FP32 [N, K], without rounding it."""
    if dy.device.type == "cpu":  # has no product of BF16 matrices in FP32
        total.addmm_(dy.t().float(), x.float())
    else:
        total.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))
