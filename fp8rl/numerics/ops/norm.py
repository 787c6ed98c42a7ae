"""Defines RMSNorm, with and without the residual add before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import composed, note, op
from fp8rl.numerics.quantize import fake_quantize_rows
from fp8rl.numerics.spec import TensorSpec


@composed
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019).

    x [..., H], weight [H]. Everything in FP32, rounded once to x's dtype at the end.
    """
    return _RmsNorm.apply(x, weight, eps)


@op
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` without a gradient."""
    wide = x.float()
    note("norm.reduction", wide)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight.float()).to(x.dtype)


@op
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [..., H], with the gradient `beside` from its other readers, and of weight [H]."""
    inverse_rms = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    dy, normed = dy.float(), x.float() * inverse_rms
    dweight = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
    dnormed = dy * weight.float()
    note("norm.reduction", dnormed)
    dx = inverse_rms * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype) if beside is None else dx.to(x.dtype) + beside, dweight


@op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(s), s) with s = x + residual, rounded to x's dtype *before* the norm, as Megatron stores it."""
    total = x + residual
    return rms_norm(total, weight, eps), total


@op
def norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, spec: TensorSpec
) -> tuple[Tensor, Tensor, Any]:
    """Return `add_rms_norm`, and the normed rows as `rows_linear` and `routed_experts` take them, quantized by `spec`.

    x [T, H]. residual: None if there is none yet; the sum is then x. No gradient. It is one op, so that a kernel need
    not read the norm again to quantize it.
    """
    normed, total = (rms_norm(x, weight, eps), x) if residual is None else add_rms_norm(x, residual, weight, eps)
    return normed, total, fake_quantize_rows(normed, spec)


def one_plus(weight: Tensor) -> Tensor:
    """Return 1 + weight in FP32: the factor of an RMSNorm whose weight is stored zero-centered (Gemma, Qwen3-Next)."""
    return 1.0 + weight.float()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm_forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *rms_norm_backward(grads[0], x, weight, ctx.eps), None
