"""Native mode: SGLang's own FP8 on a GPU with the run's scales, and on a CPU, where it has none, with our products."""

from __future__ import annotations

from typing import Any

import torch

from fp8rl.numerics import ops
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.quantize import QuantizedTensor, quantize
from fp8rl.rollout.plugin.state import state


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


def _product(parameter: torch.nn.Parameter, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    current = state()
    operand = current.weights.operand(parameter)
    return grouped_linear(x, counts, parameter.unbind(0), operand, current.numerics.rollout_spec, "bf16")


def quantize_groups(
    x: torch.Tensor,
    x_q: torch.Tensor,
    x_s: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    *,
    scale_ue8m0: bool,
    fuse_silu_and_mul: bool,
    masked_m: torch.Tensor | None,
) -> None:
    """`_run_per_token_group_quant_8bit_kernel`: the activations x [T, K] of every FP8 product, dense or routed.

    x_q FP8 [T, K] and x_s FP32 [T, K / 128], of any strides, are written with the run's codes and scales. SGLang's
    kernel has FP32 scales, and a group of zeros has 1e-10 / 448 where ours has 1; its codes are 0 in both.
    """
    spec = state().numerics.rollout_spec.activation
    if scale_ue8m0 or fuse_silu_and_mul or masked_m is not None or group_size != spec.group:
        raise NotImplementedError(
            f"fp8rl plugin: found an FP8 product that wants its activations packed, fused, masked or in groups of "
            f"{group_size}, expected rows in groups of {spec.group}; use --moe-runner-backend triton on a Hopper GPU"
        )
    quantize(x, spec, QuantizedTensor(x_q, x_s, spec))


def quantize_only_group(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """`sglang_per_token_quant_fp8`, which SGLang takes where K is one group: x [T, 128] -> codes, scales [T, 1]."""
    spec = state().numerics.rollout_spec.activation
    if x.shape[-1] != spec.group:
        raise NotImplementedError(f"fp8rl plugin: found one scale for {x.shape[-1]} channels, expected {spec.group}")
    quantized = quantize(x, spec)
    return quantized.data, quantized.scale_inv
