"""SwiGLU, the gated activation of the MLPs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.backend.dispatch import op


@op
def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up (Shazeer 2020), [..., 2F] -> [..., F], gate first. FP32 inside, rounded once."""
    return _SwiGlu.apply(gate_up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.float().chunk(2, -1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, -1)
        dy = grads[0].float()
        dgate_up = torch.empty_like(gate_up)
        dgate, dup = dgate_up.chunk(2, -1)
        dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))
        dup.copy_(F.silu(gate).mul_(dy))
        return (dgate_up,)
