"""Ops that all models have in the engine: embedding, norms, products and the head.

Exact mode replaces SGLang's norms and products by the shared ops. Native mode keeps SGLang's FP8 products on a GPU,
with the run's scales. On a CPU, where SGLang has none, it replaces them by ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.program import ADD_NORM, EMBED, LINEAR, NORM
from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.ops import LowRank
from fp8rl.numerics.quantize import QuantizedTensor, quantize
from fp8rl.numerics.spec import TensorSpec
from fp8rl.rollout.engine.plugin.families import EngineFamily, EngineSide, Hook, Probed
from fp8rl.rollout.engine.plugin.state import Normed, state

_PLAIN = "layers.quantization.unquant.UnquantizedLinearMethod.apply"
_FP8 = "layers.quantization.fp8.Fp8LinearMethod.apply"
_FP8_KERNEL = "kernels.ops.quantization.fp8_kernel."
_NORM = "x residual post_residual_addition quant_linear"
_GEMMA_NORM = "x residual post_residual_addition"
_HEAD = "layers.logits_processor.LogitsProcessor._compute_lm_head"
_LLAMA = "models.llama.LlamaForCausalLM."
_SGLANGS = TensorSpec(scale="fp32")
"""How SGLang quantizes activations: with FP32 scales before Blackwell, whatever the checkpoint's scale_fmt says."""


def _hooks(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    loads = (Hook(_LLAMA + "load_weights", "around", load_with_scales, "weights"),)
    if numerics.mode == "exact":
        forward = "forward_cuda" if cuda else "forward_native"
        norm = _norm_hook(lambda module: module.weight, quantize=cuda)
        zero_centered = _norm_hook(lambda module: ops.one_plus(module.weight), quantize=cuda)
        norms = (ops.rms_norm, ops.add_rms_norm)
        return (
            *loads,
            Hook(f"layers.layernorm.RMSNorm.{forward}", "replace", norm, _NORM, norms),
            Hook(f"layers.layernorm.GemmaRMSNorm.{forward}", "replace", zero_centered, _GEMMA_NORM, norms),
            Hook(_PLAIN, "replace", linear, "layer x bias", (ops.linear,)),
            Hook(_FP8, "replace", fp8_linear, "layer x bias", (ops.linear,)),
            Hook(_HEAD, "replace", lm_head, "hidden_states lm_head embedding_bias", (ops.linear,)),
        )
    if not numerics.rollout_spec.quantized:
        return ()
    if not cuda:  # SGLang has FP8 products for CPUs with AMX only
        return (*loads, Hook(_FP8, "replace", fp8_linear, "layer x bias"))
    if numerics.rollout_spec.activation == _SGLANGS:
        return loads
    return (
        *loads,
        Hook(
            _FP8_KERNEL + "_run_per_token_group_quant_8bit_kernel",
            "replace",
            quantize_groups,
            "x x_q x_s group_size eps fp8_min fp8_max scale_ue8m0 fuse_silu_and_mul masked_m",
        ),
        Hook(_FP8_KERNEL + "sglang_per_token_quant_fp8", "replace", quantize_only_group, "x dtype"),
    )


def load_with_scales(original: Callable[..., Any], self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
    """`LlamaForCausalLM.load_weights`, with the scales of FP8 blocks: SGLang looks for them under a name that no
    parameter has, and silently drops them."""
    from sglang.srt.model_loader.auto_loader import STANDARD_STACKED_MAPPING

    held = dict(self.named_parameters())

    def others() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if not name.endswith(SCALE_SUFFIX):
                yield name, tensor
            elif STANDARD_STACKED_MAPPING.try_load(name, tensor, held) is None:
                held[name].weight_loader(held[name], tensor)

    return original(self, others())


def _norm_hook(weight_of: Callable[[Any], Tensor], quantize: bool) -> Callable[..., Any]:
    """Return the forward of a norm by the shared ops. quantize: a norm of the residual stream also quantizes its rows
    in the same launch, since on a GPU a second launch costs more than the bytes of the rows."""

    def norm(
        self: Any,
        x: Tensor,
        residual: Tensor | None = None,
        post_residual_addition: Tensor | None = None,
        quant_linear: Any = None,
    ) -> Any:
        if post_residual_addition is not None:
            raise NotImplementedError(
                "exact mode: found a second residual in RMSNorm, expected none; use another model"
            )
        stream = x.dim() == 2 and quantize and x.shape[1] == state().weights.definition.sizes.hidden_size
        computed = add_norm_and_quantize if stream else add_norm
        normed, total = computed(x, residual, weight_of(self), self.variance_epsilon)
        return normed if residual is None else (normed, total)

    return norm


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum itself."""
    return (ops.rms_norm(x, weight, eps), x) if residual is None else ops.add_rms_norm(x, residual, weight, eps)


def add_norm_and_quantize(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Like `add_norm`, and quantize the norm's rows. Products find the quantized rows in the plugin's state."""
    current = state()
    spec = current.numerics.rollout_spec
    if not spec.quantized:
        return add_norm(x, residual, weight, eps)
    normed, total, rows = ops.norm_rows(x, residual, weight, eps, spec.activation)
    current.normed = Normed.of(normed, rows)
    return normed, total


def linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return _product(layer, x, bias, partial(ops.linear_partial, x, layer.weight), partial(ops.linear, x, layer.weight))


def fp8_linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    current = state()
    operand, spec = current.weights.operand(layer.weight), current.numerics.rollout_spec
    rows = current.rows_of(x)

    def product(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return partial(of, x, layer.weight, operand, spec, "bf16")

    def whole(splits: int, plus: Tensor | None) -> Tensor:
        if rows is None or splits > 1:
            return product(ops.fp8_linear)(splits, plus)
        return ops.rows_linear(rows, operand, x.dtype, plus)

    return _product(layer, x, bias, product(ops.fp8_linear_partial), whole)


def _product(
    layer: Any, x: Tensor, bias: Tensor | None, of_rank: Callable[[], Tensor], whole: Callable[..., Tensor]
) -> Tensor:
    """Return a product, with its bias and the adapter of its weight.

    of_rank: returns this rank's FP32 partial, where ranks share the K of the product. whole: returns the product, given
    a number of splits of K and the adapter's term. Only row-parallel products have several splits: the trainer splits
    their K over its tensor-parallel ranks.
    """
    from sglang.srt.layers.linear import RowParallelLinear

    low_rank, row_parallel = state().weights.low_rank(layer.weight), isinstance(layer, RowParallelLinear)
    if row_parallel and layer.tp_size > 1:
        return ops.add_bias(_merged(of_rank(), x, low_rank), bias)
    splits = state().numerics.k_splits if row_parallel else 1
    plus = None if low_rank is None else ops.low_rank_of(x, low_rank, splits)
    return ops.add_bias(whole(splits, plus), bias)


def lm_head(self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None) -> Tensor:
    return ops.linear(hidden_states, lm_head.weight)


# An engine of several tensor-parallel ranks in exact mode: what one rank alone would compute, to the bit.
#
# SGLang has each rank round its part of a sum to BF16 and then adds the parts up. Here the ranks exchange what is not
# rounded yet, each makes the whole result in the trainer's order, and rank 0 alone hands it to SGLang's sum. The others
# add -0, which changes no number. SGLang's sum on a GPU may turn +0 into -0; no log-probability depends on that.


def _merged(own: Tensor, x: Tensor, low_rank: LowRank | None = None) -> Tensor:
    """Return on rank 0 the sum of all ranks' FP32 partials [T, N] of x [T, K], in rank order, and of the adapter's
    term, rounded once."""
    from sglang.srt.distributed import get_tp_group

    width = own.shape[-1]
    if low_rank is not None:
        own = torch.cat((own, ops.linear_partial(x, low_rank.a)), -1)
    parts, plus = get_tp_group().all_gather(own.contiguous()[None], dim=0), None
    if low_rank is not None:
        h = ops.merge_partials(list(parts[..., width:]), x.dtype)
        plus = low_rank.on_rows(ops.low_rank_term(h, low_rank.b, low_rank.scale, low_rank.parts))
    return on_rank_0(ops.merge_partials(list(parts[..., :width]), x.dtype, plus))


def on_rank_0(result: Tensor) -> Tensor:
    return result if state().weights.rank.rank == 0 else torch.full_like(result, -0.0)


def quantize_groups(
    x: Tensor,
    x_q: Tensor,
    x_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    *,
    scale_ue8m0: bool,
    fuse_silu_and_mul: bool,
    masked_m: Tensor | None,
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


def quantize_only_group(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """`sglang_per_token_quant_fp8`, which SGLang takes where K is one group: x [T, 128] -> codes, scales [T, 1]."""
    spec = state().numerics.rollout_spec.activation
    if x.shape[-1] != spec.group:
        raise NotImplementedError(f"fp8rl plugin: found one scale for {x.shape[-1]} channels, expected {spec.group}")
    quantized = quantize(x, spec)
    return quantized.data, quantized.scale_inv


def never(*args: Any, **kwargs: Any) -> bool:
    """Answer no to a question of SGLang's, as whether it may use a fused kernel."""
    return False


def _add_norm(_: Probed, module: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
    return (module(x.clone()), x) if residual is None else tuple(module(x, residual))


def _linear(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    model = engine.runner.model
    if module is not model.lm_head:
        return (module(x)[0],)
    return (model.logits_processor._compute_lm_head(x, module)[:, : engine.sizes.vocab_size],)


def epsilon(module: Any) -> tuple[float, ...]:
    return (module.variance_epsilon,)


FAMILY = EngineFamily(
    sides={
        EMBED: EngineSide(lambda _, module, tokens: (module(tokens),)),
        NORM: EngineSide(lambda _, module, x: (module(x),), constants=epsilon),
        ADD_NORM: EngineSide(_add_norm, constants=epsilon),
        LINEAR: EngineSide(_linear),
    },
    hooks=_hooks,
)
