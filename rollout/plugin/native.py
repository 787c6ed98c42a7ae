"""The FP8 experts in native mode: SGLang's own order of operations around the shared FP8 products."""

from __future__ import annotations

from typing import Any

import torch

from numerics import ops
from numerics.ops.grouped import grouped_linear
from rollout.plugin.engine import state


def fp8_moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """`fused_moe_native.moe_forward_native`, which SGLang runs in BF16 on a CPU, with FP8 products.

    SiLU and its product with the up half are rounded one after the other, and the router's weights multiply the
    second product's output; both are SGLang's.
    """
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    weights, experts, _ = dispatch_output.topk_output
    order, counts = ops.group_by_expert(experts.long(), layer.num_experts)
    gate_up = _product(layer.w13_weight, x[order // experts.shape[1]], counts)
    down = _product(layer.w2_weight, SiluAndMul()(gate_up), counts)
    outputs = torch.empty_like(down)
    outputs[order] = down
    choices = outputs.view(*experts.shape, -1).type(weights.dtype)
    combined = choices.mul_(weights.unsqueeze(-1)).sum(dim=1).type(x.dtype)
    return StandardCombineInput(hidden_states=combined)


def _product(parameter: torch.nn.Parameter, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    current = state()
    matrices = list(parameter.unbind(0))
    dequantized = current.weights.dequantized(parameter)
    return grouped_linear(x, counts, matrices, dequantized, current.numerics.rollout_spec, "bf16")
