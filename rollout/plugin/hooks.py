"""Every place where the plugin reaches into SGLang, with the signature that it expects to find there.

SGLang moves fast. A target whose parameters are not the ones listed here is refused, by name, before anything is
hooked.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from fp8rl.models import forms
from fp8rl.models.forms import OpForm
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import TensorSpec
from fp8rl.rollout.plugin import latent, lifecycle, native, ops, sampling, sleeping
from fp8rl.rollout.plugin.state import state

SGLANG_VERSION = "0.5.19"


@dataclasses.dataclass(frozen=True)
class Hook:
    """One function of SGLang that the plugin changes.

    target: dotted name under `sglang.srt`, or `kernels...` under `sglang`. kind: SGLang's `HookType` (replace,
    around, before, after).

    parameters: the names of the target's parameters, in order, without `self`. provides: the forms of ops that are
    computed there by their definition.
    """

    target: str
    kind: str
    function: Callable[..., Any]
    parameters: str
    provides: tuple[OpForm, ...] = ()

    @property
    def path(self) -> str:
        return f"sglang.{self.target}" if self.target.startswith("kernels.") else f"sglang.srt.{self.target}"


_NORMS, _PRODUCTS = (forms.NORM, forms.ADD_NORM, forms.HEAD_NORM, forms.HEADS_NORM), (forms.LINEAR, forms.QKV)
_EXPERTS = (forms.EXPERTS, forms.EXPERTS_AND_SHARED)
_TORCH_ATTENTION = "layers.attention.torch_native_backend.TorchNativeAttnBackend."
_TRITON_ATTENTION = "layers.attention.triton_backend.TritonAttnBackend."
_ROTARY = "layers.rotary_embedding.base.RotaryEmbedding."
_PLAIN = "layers.quantization.unquant."
_FP8 = "layers.quantization.fp8."
_FP8_KERNEL = "kernels.ops.quantization.fp8_kernel."
_NORM = "x residual post_residual_addition quant_linear"
_ROPE = "positions query key offsets fused_set_kv_buffer_arg"
_TOPK = "hidden_states gating_output topk renormalize correction_bias scoring_func"
_GROUPED = "hidden_states gating_output correction_bias topk renormalize num_expert_group topk_group "
_GROUPED += "num_fused_shared_experts routed_scaling_factor apply_routed_scaling_factor_on_output"
_FUSED = "routed_scaling_factor apply_routed_scaling_factor_on_output num_fused_shared_experts packed_out "
_FUSED += "num_token_non_padded"
_CACHE = "query output k_cache v_cache req_to_token req_pool_indices seq_lens"
_MASK = "encoder_lens scaling enable_gqa causal is_cross_attn sliding_window_size"
_MLA = "positions hidden_states forward_batch zero_allocator layer_scatter_modes llama_4_scaling prev_topk_indices"
_ROPE_CPU = "head_size rotary_dim max_position base is_neox_style rope_scaling dtype partial_rotary_factor device"
_LAYER = "q k v layer forward_batch save_kv_cache sinks score_mod aux_tensors"
_DEEPSEEK_WEIGHTS = "models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin."
_MEMORY = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_UPDATER = "model_executor.model_runner_components.weight_updater.WeightUpdater."

# A checkpoint's FP8 weights, as they are.
_FP8_LAYOUT: tuple[Hook, ...] = (
    Hook(
        _FP8 + "Fp8LinearMethod.process_weights_after_loading_block_quant", "replace", lifecycle.no_repacking, "layer"
    ),
    Hook(_FP8 + "Fp8MoEMethod.process_weights_after_loading_block_quant", "replace", lifecycle.no_repacking, "layer"),
)

_EXACT_OPS: tuple[Hook, ...] = (
    Hook(_PLAIN + "UnquantizedLinearMethod.apply", "replace", ops.linear, "layer x bias", _PRODUCTS),
    Hook(_PLAIN + "UnquantizedFusedMoEMethod.apply", "replace", ops.moe, "layer dispatch_output", _EXPERTS),
    Hook(_FP8 + "Fp8LinearMethod.apply", "replace", ops.fp8_linear, "layer x bias", _PRODUCTS),
    Hook(_FP8 + "Fp8MoEMethod.apply", "replace", ops.fp8_moe, "layer dispatch_output", _EXPERTS),
    Hook("models.glm4_moe.Glm4MoeGate.forward", "replace", ops.router_logits, "hidden_states", (forms.ROUTER,)),
    Hook(
        "models.glm4_moe_lite.Glm4MoeLiteGate.forward", "replace", ops.router_logits, "hidden_states", (forms.ROUTER,)
    ),
    Hook(
        "models.deepseek_v2.MoEGate.forward",
        "replace",
        ops.router_logits,
        "hidden_states gemm_output_zero_allocator forward_batch",
        (forms.ROUTER,),
    ),
    Hook(
        "models.deepseek_v2.DeepseekV2AttentionMLA.forward",
        "replace",
        latent.attention,
        _MLA,
        (forms.LATENT_DOWN, forms.LATENT_ATTENTION),
    ),
    # A BF16 product of few rows that goes around the hook of products.
    Hook("models.deepseek_v2.fused_a_gemm_weight_eligible", "replace", lifecycle.never, "layer"),
    # Copies of kv_b_proj for SGLang's own attention.
    Hook(_DEEPSEEK_WEIGHTS + "post_load_weights", "replace", latent.no_copies, "is_nextn weight_names"),
    Hook("layers.moe.topk.biased_grouped_topk", "replace", ops.biased_grouped_topk, _GROUPED, (forms.SIGMOID_TOPK,)),
    Hook(
        "layers.logits_processor.LogitsProcessor._compute_lm_head",
        "replace",
        ops.lm_head,
        "hidden_states lm_head embedding_bias",
        (forms.LINEAR,),
    ),
    Hook(
        "layers.sampler.Sampler.forward",
        "around",
        sampling.of_samples,
        "logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
        (forms.LOGPROBS,),
    ),
    Hook(
        "layers.logprob_processor.InputLogprobProcessor.forward",
        "around",
        sampling.of_prompts,
        "pruned_states sample_indices input_logprob_indices token_to_seq_idx lm_head get_logits_fn logits_metadata "
        "skip_chunking_for_dp_attn",
    ),
)

_EXACT_OPS_CPU: tuple[Hook, ...] = (
    Hook("layers.layernorm.RMSNorm.forward_native", "replace", ops.rms_norm, _NORM, _NORMS),
    Hook(
        _ROTARY + "forward_native",
        "replace",
        ops.rotary_embedding,
        _ROPE,
        (forms.ROPE,),
    ),
    Hook("layers.activation.SiluAndMul.forward_native", "replace", ops.silu_and_mul, "x", (forms.SWIGLU,)),
    Hook("layers.moe.topk.fused_topk_native", "replace", ops.fused_topk, _TOPK, (forms.TOPK,)),
    Hook(
        _TORCH_ATTENTION + "_run_sdpa_forward_extend",
        "replace",
        ops.attention_extend,
        f"{_CACHE} extend_prefix_lens extend_seq_lens {_MASK}",
        (forms.ATTENTION,),
    ),
    Hook(
        _TORCH_ATTENTION + "_run_sdpa_forward_decode",
        "replace",
        ops.attention_decode,
        f"{_CACHE} {_MASK}",
        (forms.ATTENTION,),
    ),
    Hook(
        "model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
        "replace",
        lifecycle.unpadded,
        "model_config load_config tp_size",
    ),
)

_EVERY_CPU: tuple[Hook, ...] = (
    # It knows YaRN alone.
    Hook("layers.rotary_embedding.factory.get_rope_cpu", "around", latent.rope_on_cpu, _ROPE_CPU),
    # A kernel that a CPU lacks, for drafts in trees.
    Hook("mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", "replace", lifecycle.no_moves, ""),
)

_EXACT_OPS_CUDA: tuple[Hook, ...] = (
    Hook("layers.layernorm.RMSNorm.forward_cuda", "replace", ops.rms_norm, _NORM, _NORMS),
    Hook(
        _ROTARY + "forward_cuda",
        "replace",
        ops.rotary_embedding,
        _ROPE,
        (forms.ROPE,),
    ),
    Hook("layers.activation.SiluAndMul.forward_cuda", "replace", ops.silu_and_mul, "x", (forms.SWIGLU,)),
    Hook("layers.moe.topk.fused_topk", "replace", ops.fused_topk, f"{_TOPK} {_FUSED}", (forms.TOPK,)),
    Hook(_TRITON_ATTENTION + "forward_extend", "replace", ops.attention_backend_extend, _LAYER, (forms.ATTENTION,)),
    Hook(_TRITON_ATTENTION + "forward_decode", "replace", ops.attention_backend_decode, _LAYER, (forms.ATTENTION,)),
    # Kernels that fuse ops which are hooked one by one.
    Hook("models.utils.can_use_fused_inplace_qknorm", "replace", lifecycle.never, "head_dim dtype"),
    Hook("models.utils.enable_fused_set_kv_buffer", "replace", lifecycle.never, "forward_batch"),
)

# Where the logprobs are SGLang's own.
_NATIVE_DRAW: tuple[Hook, ...] = (
    Hook(
        "layers.sampler.Sampler._sample_from_probs",
        "around",
        sampling.draw_from_probabilities,
        "probs sampling_info positions simple_sampling_case",
    ),
)

# SGLang has FP8 products for CPUs with AMX only, so these two are ours; everything else is its own.
_NATIVE_FP8_CPU: tuple[Hook, ...] = (
    Hook(_FP8 + "Fp8LinearMethod.apply", "replace", ops.fp8_linear, "layer x bias"),
    Hook(_FP8 + "Fp8MoEMethod.apply", "replace", native.fp8_moe, "layer dispatch_output"),
    # Copies of kv_b_proj, which SGLang makes in BF16 on a GPU, and on a CPU quantizes once more, with one scale.
    Hook(
        "models.deepseek_common.deepseek_weight_loader.block_quant_to_tensor_quant",
        "replace",
        latent.dequantized,
        "x_q_block x_s block_size",
    ),
)

# With torch_native SGLang takes for granted that a cache holds keys of heads, and gives latents to the wrong attention.
_NATIVE_LATENT_CPU: tuple[Hook, ...] = (
    Hook(
        "models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method",
        "replace",
        latent.absorbed,
        "forward_batch",
    ),
)

# SGLang's scales are FP32 below Blackwell, whatever the checkpoint's scale_fmt says.
_SGLANGS = TensorSpec(scale="fp32")
_NATIVE_QUANTIZER_CUDA: tuple[Hook, ...] = (
    Hook(
        _FP8_KERNEL + "_run_per_token_group_quant_8bit_kernel",
        "replace",
        native.quantize_groups,
        "x x_q x_s group_size eps fp8_min fp8_max scale_ue8m0 fuse_silu_and_mul masked_m",
    ),
    Hook(_FP8_KERNEL + "sglang_per_token_quant_fp8", "replace", native.quantize_only_group, "x dtype"),
)

_EVERY_MODE: tuple[Hook, ...] = (
    # weights
    Hook("model_executor.model_runner.ModelRunner.load_model", "around", lifecycle.load_model, ""),
    Hook(
        "model_executor.model_runner.ModelRunner.forward",
        "before",
        lifecycle.before_forward,
        "forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend split_forward_count",
    ),
    Hook(
        _UPDATER + "update_weights_from_disk",
        "before",
        lifecycle.before_update,
        "model_path load_format weight_name_filter recapture_cuda_graph",
    ),
    Hook(_UPDATER + "update_weights_from_tensor", "around", lifecycle.update_from_tensor, "named_tensors load_format"),
    Hook(
        _UPDATER + "update_weights_from_distributed",
        "before",
        lifecycle.before_update,
        "names dtypes shapes group_name load_format",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.check_weights",
        "around",
        lifecycle.check_weights,
        "action allow_quant_error",
    ),
    # pauses
    Hook("managers.scheduler.Scheduler.flush_cache", "around", sleeping.flush_cache, "empty_cache"),
    Hook("managers.scheduler.Scheduler.process_input_requests", "after", sleeping.process_input_requests, "recv_reqs"),
    # sleep
    Hook(_MEMORY + "release_memory_occupation", "around", sleeping.release, "recv_req"),
    Hook(_MEMORY + "resume_memory_occupation", "around", sleeping.resume, "recv_req"),
    # seeds
    Hook(
        "sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        "after",
        sampling.seeds_of_batch,
        "batch vocab_size",
    ),
    # routes
    Hook(
        "state_capturer.base.BaseHostCache.__init__",
        "replace",
        lifecycle.make_host_cache,
        "num_tokens num_layers topk_size name",
    ),
)


def hooks_for(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    """What is hooked in an engine of these numerics on a GPU or a CPU, no more and no less.

    Exact mode replaces every op. Native mode replaces the draw, the FP8 products on a CPU, and on a GPU the quantizer
    of activations unless they are rounded under FP32 scales as SGLang does; in a BF16 engine the draw alone.
    """
    every = _EVERY_MODE if cuda else (*_EVERY_MODE, *_EVERY_CPU)
    if numerics.mode == "exact":
        return (*(_EXACT_OPS_CUDA if cuda else _EXACT_OPS_CPU), *_EXACT_OPS, *_FP8_LAYOUT, *every)
    if not cuda:
        every = (*every, *_NATIVE_LATENT_CPU)
    if not numerics.rollout_spec.quantized:
        return (*_NATIVE_DRAW, *every)
    quantizer = () if numerics.rollout_spec.activation == _SGLANGS else _NATIVE_QUANTIZER_CUDA
    return (*(quantizer if cuda else _NATIVE_FP8_CPU), *_NATIVE_DRAW, *_FP8_LAYOUT, *every)


def provided(hooks: Sequence[Hook]) -> tuple[str, ...]:
    """Names of the forms of ops that are computed by their definition with these hooks, sorted."""
    return tuple(sorted({form.name for hook in hooks for form in hook.provides}))


def install(hooks: Sequence[Hook]) -> None:
    """Register all hooks, and say so in the plugin's report."""
    register(hooks)
    state().hooks = tuple(hook.target for hook in hooks)
    state().provides = provided(hooks)


def register(hooks: Sequence[Hook]) -> None:
    """Register all hooks with SGLang, or none. Raises `RuntimeError` naming every target that is not as expected."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    problems = [problem for hook in hooks if (problem := _problem(hook))]
    if problems:
        found = importlib.metadata.version("sglang")
        raise RuntimeError(
            f"fp8rl plugin: sglang {found} is not as expected (written for {SGLANG_VERSION}); nothing was hooked:\n"
            + "\n".join(problems)
        )
    for hook in hooks:
        HookRegistry.register(hook.path, hook.function, HookType(hook.kind))


def _problem(hook: Hook) -> str | None:
    try:
        target = pkgutil.resolve_name(hook.path)
    except (ImportError, AttributeError) as error:
        return f"  {hook.path}: not found ({error})"
    found = [name for name in inspect.signature(target).parameters if name != "self"]
    expected = hook.parameters.split()
    return None if found == expected else f"  {hook.path}: found the parameters {found}, expected {expected}"
