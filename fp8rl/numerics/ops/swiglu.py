"""SwiGLU, the gated activation of the MLPs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.backend.dispatch import composed, op


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
    """Return the gradient of gate_up [..., 2F] from that of the result, dy [..., F]."""
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
