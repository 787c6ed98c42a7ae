"""MLPs and routed experts in the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.families.mlp import EXPERTS, EXPERTS_AND_SHARED, ROUTER, SHARED_GATE, SIGMOID_TOPK, SWIGLU, TOPK
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.rollout.engine.plugin.families import EngineFamily, EngineSide, Hook, Probed
from fp8rl.rollout.engine.plugin.families.ends import on_rank_0
from fp8rl.rollout.engine.plugin.state import state

_BF16 = "layers.quantization.unquant.UnquantizedFusedMoEMethod.apply"
_FP8 = "layers.quantization.fp8.Fp8MoEMethod.apply"
_ARGUMENTS = "layer dispatch_output"
_TOPK = "hidden_states gating_output topk renormalize correction_bias scoring_func"
_GROUPED = "hidden_states gating_output correction_bias topk renormalize num_expert_group topk_group "
_GROUPED += "num_fused_shared_experts routed_scaling_factor apply_routed_scaling_factor_on_output"
_FUSED = "routed_scaling_factor apply_routed_scaling_factor_on_output num_fused_shared_experts packed_out "
_FUSED += "num_token_non_padded"
_GATED, _TOKEN = "models.qwen2_moe.fused_gate_sigmoid_mul_add", (ops.token_gate,)


def _hooks(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    gated = Hook(_GATED, "replace", add_gated, "hidden_states gate_weight shared_output final_hidden_states", _TOKEN)
    if numerics.mode == "native":
        if cuda:
            return ()
        # SGLang has FP8 products for CPUs with AMX only, and the gate of a shared expert as a Triton kernel.
        products = (Hook(_FP8, "replace", native_fp8_moe, _ARGUMENTS),) if numerics.rollout_spec.quantized else ()
        return (*products, replace(gated, provides=()))
    forward, choice = ("forward_cuda", "fused_topk") if cuda else ("forward_native", "fused_topk_native")
    router, rows = (ops.linear_partial,), "hidden_states"
    deepseek = "hidden_states gemm_output_zero_allocator forward_batch"
    return (
        Hook(f"layers.activation.SiluAndMul.{forward}", "replace", lambda _, x: ops.swiglu(x), "x", (ops.swiglu,)),
        Hook(f"layers.moe.topk.{choice}", "replace", fused_topk, f"{_TOPK} {_FUSED}" if cuda else _TOPK, (ops.route,)),
        Hook("layers.moe.topk.biased_grouped_topk", "replace", biased_grouped_topk, _GROUPED, (ops.route_sigmoid,)),
        Hook(_BF16, "replace", moe, _ARGUMENTS, (ops.experts,)),
        Hook(_FP8, "replace", fp8_moe, _ARGUMENTS, (ops.experts,)),
        Hook("models.glm4_moe.Glm4MoeGate.forward", "replace", router_logits, rows, router),
        Hook("models.glm4_moe_lite.Glm4MoeLiteGate.forward", "replace", router_logits, rows, router),
        Hook("models.deepseek_v2.MoEGate.forward", "replace", router_logits, deepseek, router),
        gated,
    )


def add_gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor) -> None:
    """`fused_gate_sigmoid_mul_add`: the shared expert's output, times its gate, is added to the routed experts'."""
    final_hidden_states += ops.token_gate(shared_output, hidden_states, gate_weight[None])


def fused_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
    scoring_func: str = "softmax",
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """others: options of SGLang's routers on a GPU. A softmax router without shared experts sets none of them."""
    if correction_bias is not None or scoring_func != "softmax" or any(others.values()):
        raise NotImplementedError("exact mode: found a router with more than a softmax; use another model")
    return ops.route(gating_output, topk, renormalize, ids=torch.int32)


def router_logits(self: Any, hidden_states: Tensor, *others: Any, **unused: Any) -> Tensor:
    """Multiply by the router's weight in BF16, as in the checkpoint: some of SGLang's models hold it in FP32."""
    return ops.linear_partial(hidden_states, self.weight.to(hidden_states.dtype))


def biased_grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Multiply the probabilities by the factor, which is applied nowhere else (`lifecycle.after_load_model`)."""
    if num_fused_shared_experts:
        raise NotImplementedError("exact mode: found shared experts among the routed ones, expected them by themselves")
    return ops.route_sigmoid(
        gating_output,
        correction_bias,
        topk,
        num_expert_group or 1,
        topk_group or 1,
        renormalize,
        routed_scaling_factor or 1.0,
        ids=torch.int32,
    )


def moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Routed experts, BF16: every expert's matrices as they are."""
    return _moe(layer, dispatch_output, lambda parameter: None)


def fp8_moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Routed experts, FP8."""
    return _moe(layer, dispatch_output, state().weights.operand)


def _moe(layer: Any, dispatch_output: Any, operand_of: Callable[[Any], Any]) -> Any:
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, current = dispatch_output.hidden_states, state()
    probs, chosen, _ = dispatch_output.topk_output
    spec = current.numerics.rollout_spec if current.numerics.rollout_spec.quantized else None
    w13, w2 = (
        ExpertWeights(parameter, operand_of(parameter), current.weights.low_rank(parameter))
        for parameter in (layer.w13_weight, layer.w2_weight)
    )

    def outputs_of(choices: Tensor, counts: Tensor) -> Tensor:
        rows = choices // chosen.shape[1]
        return ops.experts(x[rows], counts, w13.of_rows(rows), w2.of_rows(rows), spec, "bf16")

    if current.weights.rank.ranks > 1:
        combined = _experts_of_ranks(outputs_of, chosen.long(), probs, layer, x.dtype)
    else:
        combined = ops.routed_experts(x, probs, chosen, w13, w2, spec, "bf16", current.rows_of(x))
    return StandardCombineInput(hidden_states=combined)


def _experts_of_ranks(
    outputs_of: Callable[[Tensor, Tensor], Tensor], chosen: Tensor, probs: Tensor, layer: Any, dtype: torch.dtype
) -> Tensor:
    """Return on rank 0 the weighted sum [T, H] over each token's experts. This rank has some of the experts.

    chosen: int64 [T, k], an expert's index on this rank, or -1 if another has it. outputs_of: what the experts make of
    (token, choice) pairs [T * k], sorted by expert, with the number of pairs of each.

    A CUDA graph may not wait for the device, and only the device knows how many pairs belong to this rank. So all
    pairs are sorted: the pairs of other ranks come after this rank's pairs, and no expert computes them.
    """
    from sglang.srt.distributed import get_tp_group

    held = layer.w13_weight.shape[0]
    order, counts = ops.group_by_expert(torch.where(chosen < 0, held, chosen), held + 1)
    outputs = outputs_of(order, counts[:held])
    own = torch.arange(len(order), device=order.device) < counts[:held].sum()
    choices = torch.empty_like(outputs)
    choices[order] = torch.where(own[:, None], outputs, -0.0)
    choices = get_tp_group().all_reduce(choices)  # of each only one rank has more than -0
    whole = torch.arange(chosen.numel(), device=chosen.device)
    return on_rank_0(ops.combine(choices, probs, whole, dtype))


def native_fp8_moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
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


def _product(parameter: torch.nn.Parameter, x: Tensor, counts: Tensor) -> Tensor:
    current = state()
    operand = current.weights.operand(parameter)
    return grouped_linear(x, counts, parameter.unbind(0), operand, current.numerics.rollout_spec, "bf16")


def _top_k(_: Probed, module: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """Return probabilities and experts. The experts are in the order in which the engine adds them up."""
    config = module.topk_config
    recording, config.allow_routed_experts_capture = config.allow_routed_experts_capture, False
    try:
        output = module(logits, logits.clone())
    finally:
        config.allow_routed_experts_capture = recording
    chosen = output.topk_ids.long()
    return torch.zeros_like(logits, dtype=torch.float32).scatter(1, chosen, output.topk_weights.float()), chosen


def _sigmoid_top_k(engine: Probed, module: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """Like `_top_k`, with the factor in the probabilities. SGLang's own models multiply the sum of experts by it."""
    probs, chosen = _top_k(engine, module, logits)
    config = module.topk_config
    behind = state().numerics.mode == "native" and not config.apply_routed_scaling_factor_on_output
    return probs * config.routed_scaling_factor if behind else probs, chosen


def _experts(_: Probed, module: Any, x: Tensor, probs: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    return (_routed(module, x, probs.gather(1, chosen), chosen),)


def _each_expert(_: Probed, module: Any, x: Tensor, probs: Tensor, chosen: Tensor, *shared: Tensor) -> Tensor:
    """Run the module once for each of a token's experts, with a weight of zero for all other experts."""
    weights, alone = probs.gather(1, chosen), torch.eye(chosen.shape[1], device=x.device)
    return torch.stack([_routed(module, x.clone(), weights * only, chosen) for only in alone], 1)


def _experts_and_shared(
    engine: Probed, module: Any, x: Tensor, probs: Tensor, chosen: Tensor, shared: Tensor
) -> tuple[Tensor, ...]:
    return (_experts(engine, module, x, probs, chosen)[0] + shared,)


def _routed(module: Any, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = torch.zeros(len(x), module.num_experts, device=x.device)
    return module(x, StandardTopKOutput(probs.float(), ids.int(), logits))


FAMILY = EngineFamily(
    sides={
        SWIGLU: EngineSide(lambda _, module, x: (module(x),)),
        TOPK: EngineSide(_top_k),
        EXPERTS: EngineSide(_experts, each=_each_expert),
        ROUTER: EngineSide(lambda _, module, x: (module(x),)),
        SIGMOID_TOPK: EngineSide(_sigmoid_top_k),
        EXPERTS_AND_SHARED: EngineSide(_experts_and_shared, each=_each_expert),
        SHARED_GATE: EngineSide(lambda _, gate, x, shared: (ops.token_gate(shared, x, gate.weight),)),
    },
    hooks=_hooks,
)
