"""Ops that all models have in the engine: embedding, norms, products, the head and log-probabilities.

Exact mode replaces SGLang's norms and products by the shared ops. Native mode has SGLang's own FP8, on a GPU with the
run's scales, and on a CPU, where it has none, our products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rl.models.forms import ADD_NORM, EMBED, LINEAR, LOGPROBS, NORM
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.quantize import QuantizedTensor, quantize
from fp8rl.numerics.sampling import GREEDY
from fp8rl.numerics.spec import TensorSpec
from fp8rl.rollout.plugin import ranks
from fp8rl.rollout.plugin.families import EngineFamily, EngineSide, Hook, Probed
from fp8rl.rollout.plugin.state import state

_PLAIN = "layers.quantization.unquant.UnquantizedLinearMethod.apply"
_FP8 = "layers.quantization.fp8.Fp8LinearMethod.apply"
_FP8_KERNEL = "kernels.ops.quantization.fp8_kernel."
_NORM = "x residual post_residual_addition quant_linear"
_HEAD = "layers.logits_processor.LogitsProcessor._compute_lm_head"
_SGLANGS = TensorSpec(scale="fp32")
"""SGLang's activations: its scales are FP32 below Blackwell, whatever the checkpoint's scale_fmt says."""


def _hooks(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    if numerics.mode == "exact":
        forward = "forward_cuda" if cuda else "forward_native"
        norms = (ops.rms_norm, ops.add_rms_norm)
        return (
            Hook(f"layers.layernorm.RMSNorm.{forward}", "replace", rms_norm, _NORM, norms),
            Hook(_PLAIN, "replace", linear, "layer x bias", (ops.linear,)),
            Hook(_FP8, "replace", fp8_linear, "layer x bias", (ops.linear,)),
            Hook(_HEAD, "replace", lm_head, "hidden_states lm_head embedding_bias", (ops.linear,)),
        )
    if not numerics.rollout_spec.quantized:
        return ()
    if not cuda:  # SGLang has FP8 products for CPUs with AMX only
        return (Hook(_FP8, "replace", fp8_linear, "layer x bias"),)
    if numerics.rollout_spec.activation == _SGLANGS:
        return ()
    return (
        Hook(
            _FP8_KERNEL + "_run_per_token_group_quant_8bit_kernel",
            "replace",
            quantize_groups,
            "x x_q x_s group_size eps fp8_min fp8_max scale_ue8m0 fuse_silu_and_mul masked_m",
        ),
        Hook(_FP8_KERNEL + "sglang_per_token_quant_fp8", "replace", quantize_only_group, "x dtype"),
    )


def rms_norm(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    if post_residual_addition is not None:
        raise NotImplementedError("exact mode: found a second residual in RMSNorm, expected none; use another model")
    if residual is None:
        return ops.rms_norm(x, self.weight, self.variance_epsilon)
    return ops.add_rms_norm(x, residual, self.weight, self.variance_epsilon)


def linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    low_rank = state().weights.low_rank(layer.weight)
    if ranks.splits(layer):
        return ops.add_bias(ranks.merged(ops.linear_partial(x, layer.weight), x, low_rank), bias)
    splits = _k_splits(layer)
    plus = None if low_rank is None else ops.low_rank_of(x, low_rank, splits)
    return ops.add_bias(ops.linear(x, layer.weight, splits, plus), bias)


def fp8_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    current = state()
    operand, low_rank = current.weights.operand(layer.weight), current.weights.low_rank(layer.weight)
    spec = current.numerics.rollout_spec
    if ranks.splits(layer):
        partial = ops.fp8_linear_partial(x, layer.weight, operand, spec, "bf16")
        return ops.add_bias(ranks.merged(partial, x, low_rank), bias)
    splits = _k_splits(layer)
    plus = None if low_rank is None else ops.low_rank_of(x, low_rank, splits)
    return ops.add_bias(ops.fp8_linear(x, layer.weight, operand, spec, "bf16", splits, plus), bias)


def lm_head(self: Any, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: Any = None) -> torch.Tensor:
    return ops.linear(hidden_states, lm_head.weight)


def _k_splits(layer: Any) -> int:
    """The trainer cuts the K of its row-parallel products over its tensor-parallel ranks, and only theirs."""
    from sglang.srt.layers.linear import RowParallelLinear

    return state().numerics.k_splits if isinstance(layer, RowParallelLinear) else 1


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


def never(*args: Any, **kwargs: Any) -> bool:
    """Return whether SGLang may take a fused kernel."""
    return False


def _add_norm(_: Probed, module: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
    return (module(x.clone()), x) if residual is None else tuple(module(x, residual))


def _linear(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    model = engine.runner.model
    if module is not model.lm_head:
        return (module(x)[0],)
    return (model.logits_processor._compute_lm_head(x, module)[:, : engine.sizes.vocab_size],)


def _logprobs(engine: Probed, _: Any, logits: Tensor) -> tuple[Tensor, ...]:
    """Through the engine's sampler, as if each target had been asked for."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    count, device = len(logits), logits.device
    one = torch.ones(count, device=device)
    info = SamplingBatchInfo(
        temperatures=torch.full((count, 1), engine.temperature, device=device),
        top_ps=one,
        top_ks=one,
        min_ps=one,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        sampling_seed=torch.full((count,), GREEDY, device=device),
        vocab_size=logits.shape[1],
        device=str(device),
    )
    output = LogitsProcessorOutput(next_token_logits=logits.float().clone())
    targets = [[token] for token in engine.targets.tolist()]
    engine.runner.sampler(output, info, True, [0] * count, targets, engine.positions)
    return (torch.stack([torch.as_tensor(row)[0] for row in output.next_token_token_ids_logprobs_val]).float(),)


def epsilon(module: Any) -> tuple[float, ...]:
    return (module.variance_epsilon,)


FAMILY = EngineFamily(
    sides={
        EMBED: EngineSide(lambda _, module, tokens: (module(tokens),)),
        NORM: EngineSide(lambda _, module, x: (module(x),), constants=epsilon),
        ADD_NORM: EngineSide(_add_norm, constants=epsilon),
        LINEAR: EngineSide(_linear),
        LOGPROBS: EngineSide(_logprobs),
    },
    hooks=_hooks,
)
