"""Defines elementwise gates: SwiGLU of MLPs, and the gates of attention's output, of shared experts, and of the norm
after linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.backend.dispatch import Probes, composed, op


@composed
def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up (Shazeer 2020), [..., 2F] -> [..., F], gate first. FP32 inside, rounded once."""
    return _SwiGlu.apply(gate_up)


@op
def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Compute `swiglu` without a gradient."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@op
def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of gate_up [..., 2F] from dy [..., F], the gradient of the result."""
    gate, up = gate_up.float().chunk(2, -1)
    dy, dgate_up = dy.float(), torch.empty_like(gate_up)
    dgate, dup = dgate_up.chunk(2, -1)
    dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))
    dup.copy_(F.silu(gate).mul_(dy))
    return dgate_up


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return swiglu_backward(ctx.saved_tensors[0], grads[0])


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)).

    torch.sigmoid computes exp by another code for the last few elements of a CPU tensor than for all other elements, so
    that a token's bits would depend on its place in the batch.
    """
    return _Sigmoid.apply(x)


class _Sigmoid(torch.autograd.Function):
    """`sigmoid` with the gradient g y (1 - y). Autograd's gradient of the formula is 0 * inf if exp(-x) overflows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = 1 / (1 + torch.exp(-x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grads[0] * y * (1 - y)


def silu(x: Tensor) -> Tensor:
    """Compute x sigmoid(x). torch's own silu computes exp by another code for the last few elements of a tensor."""
    return x * sigmoid(x)


@composed
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Compute x * sigmoid(gate), both [..., N]. FP32 inside, rounded once to x's dtype."""
    return _SigmoidGate.apply(x, gate)


@op
def sigmoid_gate_forward(x: Tensor, gate: Tensor) -> Tensor:
    """Compute `sigmoid_gate` without a gradient."""
    return (x.float() * sigmoid(gate.float())).to(x.dtype)


@composed
def token_gate(x: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute x * sigmoid(hidden · weight), one gate for each token: x [..., N], hidden [..., H], weight [1, H].

    The product is one FP32 sum over H, in an order that depends on H alone. It is not rounded. The result is rounded
    once to x's dtype.
    """
    return _TokenGate.apply(x, hidden, weight)


@op
def token_gate_forward(x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `token_gate` without a gradient. Also return the gates, FP32 [..., 1]."""
    open_ = sigmoid((hidden.float() * weight.float()).sum(-1, keepdim=True))
    return (x.float() * open_).to(x.dtype), open_


@composed
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute rms_norm(x, weight) * silu(gate) over the last dimension: x and gate [..., D], weight [D].

    The mean of squares is one FP32 sum over D. Everything is in FP32 and rounded once to x's dtype at the end.
    transformers rounds the normed value once more.
    """
    return _GatedRmsNorm.apply(x, gate, weight, eps)


@op
def gated_rms_norm_forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `gated_rms_norm` without a gradient. Also return 1 / rms(x), FP32 [..., 1]."""
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight.float() * silu(gate.float())).to(x.dtype), inverse_rms


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return sigmoid_gate_forward(x, gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        open_, dy = sigmoid(gate.float()), grads[0].float()
        return (dy * open_).to(x.dtype), (dy * x.float() * open_ * (1 - open_)).to(gate.dtype)


class _TokenGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        out, open_ = token_gate_forward(x, hidden, weight)
        ctx.save_for_backward(x, hidden, weight, open_)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, hidden, weight, open_ = ctx.saved_tensors
        dy = grads[0].float()
        dlogit = (dy * x.float()).sum(-1, keepdim=True) * open_ * (1 - open_)
        dweight = (dlogit * hidden.float()).flatten(0, -2).sum(0, keepdim=True)
        return (dy * open_).to(x.dtype), (dlogit * weight.float()).to(hidden.dtype), dweight.to(weight.dtype)


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse_rms = gated_rms_norm_forward(x, gate, weight, eps)
        ctx.save_for_backward(x, gate, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight, inverse_rms = ctx.saved_tensors
        dy, wide, z = grads[0].float(), x.float() * inverse_rms, gate.float()
        open_ = sigmoid(z)
        dscaled = dy * z * open_
        dweight = (dscaled * wide).flatten(0, -2).sum(0)
        dnormed = dscaled * weight.float()
        dx = inverse_rms * (dnormed - wide * (dnormed * wide).mean(-1, keepdim=True))
        dgate = dy * wide * weight.float() * open_ * (1 + z * (1 - open_))
        return dx.to(x.dtype), dgate.to(gate.dtype), dweight.to(weight.dtype), None


def _trial(random: Callable[..., Tensor], count: int) -> dict[str, Callable[[int], Tensor]]:
    x, gate, weight = random(count, 384), random(count, 384), random(1, 384) / 16
    heads, gates = x.view(count, 3, 128), gate.view(count, 3, 128)
    return {
        "sigmoid_gate": lambda n: sigmoid_gate(x[:n], gate[:n]),
        "token_gate": lambda n: token_gate(x[:n], gate[:n], weight),
        "gated_rms_norm": lambda n: gated_rms_norm(heads[:n], gates[:n], weight[0, :128], 1e-6),
    }


PROBES = Probes(rows=_trial)
