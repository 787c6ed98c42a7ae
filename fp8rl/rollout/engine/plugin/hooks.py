"""Lists every function of SGLang that the plugin changes, with the parameters that it must have.

SGLang changes fast. If a target has other parameters than listed here, an error names the target, and no hook is
installed.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.files import changed_signature
from fp8rl.rollout.engine.plugin import lifecycle, model, native, sampling
from fp8rl.rollout.engine.plugin.state import state

SGLANG_VERSION = "0.5.19"


@dataclass(frozen=True)
class Hook:
    """One function of SGLang that the plugin changes."""

    target: str
    """Dotted name under `sglang.srt`, or `kernels...` under `sglang`."""
    kind: str
    """SGLang's `HookType`: replace, around, before, after."""
    function: Callable[..., Any]
    parameters: str
    """Names of the target's parameters, in order, without `self`."""

    @property
    def path(self) -> str:
        return f"sglang.{self.target}" if self.target.startswith("kernels.") else f"sglang.srt.{self.target}"


def hooks_for(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    """Return all hooks of an engine with these numerics. cuda: whether it runs on a GPU."""
    of_mode = _exact(cuda) if numerics.mode == "exact" else _native(numerics, cuda)
    return (*of_mode, *_EVERY_MODE)


def _exact(cuda: bool) -> Iterator[Hook]:
    """Yield the hooks of exact mode. One model replaces all models of SGLang, and seeded draws replace its draws."""
    yield Hook(
        "model_loader.utils.get_model_architecture", "replace", model.program_of_any_architecture, "model_config"
    )
    yield Hook(
        "layers.sampler.Sampler.forward",
        "around",
        sampling.of_samples,
        "logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
    )
    yield Hook(
        "layers.logprob_processor.InputLogprobProcessor.forward",
        "around",
        sampling.of_prompts,
        "pruned_states sample_indices input_logprob_indices token_to_seq_idx lm_head get_logits_fn logits_metadata "
        "skip_chunking_for_dp_attn",
    )
    if cuda:
        # SGLang would rather take states for its prefix cache out of its own kernels, and overlap batches. Without that
        # it copies a slot between two batches, as on a CPU.
        supports = "arg_groups.overrides.supports_mamba_cache_extra_buffer"
        yield Hook(supports, "replace", native.never, "view model_arch")
    else:
        unaligned = "model_executor.model_runner.adjust_config_with_unaligned_cpu_tp"
        yield Hook(unaligned, "replace", lifecycle.unpadded, "model_config load_config tp_size")


_FP8 = "layers.quantization.fp8."
_FP8_KERNEL = "kernels.ops.quantization.fp8_kernel."
_MLA = "models.deepseek_v2.DeepseekV2AttentionMLA."
_NETS = ("models.qwen3_next.Qwen3GatedDeltaNet.", "models.qwen3_5.Qwen3_5GatedDeltaNet.")
_GROUPS = "x x_q x_s group_size eps fp8_min fp8_max scale_ue8m0 fuse_silu_and_mul masked_m"
_ROPE_CPU = "head_size rotary_dim max_position base is_neox_style rope_scaling dtype partial_rotary_factor device"


def _native(numerics: NumericsConfig, cuda: bool) -> Iterator[Hook]:
    """Yield the hooks of native mode. They replace SGLang's draws. In an FP8 engine on a CPU they replace the FP8
    products. On a GPU they replace the quantizer of activations, unless the spec quantizes them as SGLang does. Other
    hooks correct errors of SGLang in single models."""
    yield Hook(
        "layers.sampler.Sampler._sample_from_probs",
        "around",
        sampling.draw_from_probabilities,
        "probs sampling_info positions simple_sampling_case",
    )
    for net in _NETS:
        made = "config layer_id quant_config alt_stream prefix"
        yield Hook(net + "__init__", "around", native.in_fp32, made)
    quantized = numerics.rollout_spec.quantized
    if quantized:
        yield Hook("models.llama.LlamaForCausalLM.load_weights", "around", native.load_with_scales, "weights")
        for layer in ("Linear", "MoE"):  # weights stay as in the checkpoint, to be compared byte for byte
            kept = f"{_FP8}Fp8{layer}Method.process_weights_after_loading_block_quant"
            yield Hook(kept, "replace", native.nothing, "layer")
    if cuda:
        if quantized and numerics.rollout_spec.activation != native.SGLANGS:
            groups, only = "_run_per_token_group_quant_8bit_kernel", "sglang_per_token_quant_fp8"
            yield Hook(_FP8_KERNEL + groups, "replace", native.quantize_groups, _GROUPS)
            yield Hook(_FP8_KERNEL + only, "replace", native.quantize_only_group, "x dtype")
        return
    if quantized:
        yield Hook(_FP8 + "Fp8LinearMethod.apply", "replace", native.fp8_linear, "layer x bias")
        yield Hook(_FP8 + "Fp8MoEMethod.apply", "replace", native.fp8_experts, "layer dispatch_output")
        # SGLang makes copies of kv_b_proj in BF16 on a GPU, and on a CPU quantizes once more, with one scale.
        copies = "models.deepseek_common.deepseek_weight_loader.block_quant_to_tensor_quant"
        yield Hook(copies, "replace", native.dequantized, "x_q_block x_s block_size")
    gated = "hidden_states gate_weight shared_output final_hidden_states"
    yield Hook("models.qwen2_moe.fused_gate_sigmoid_mul_add", "replace", native.add_gated, gated)
    layer = "models.qwen3_5.Qwen3_5AttentionDecoderLayer.self_attention"
    yield Hook(layer, "replace", native.gated_attention, "positions hidden_states forward_batch")
    for net in _NETS:
        yield Hook(net + "forward", "replace", native.linear_attention, "hidden_states forward_batch")
    # With torch_native SGLang takes for granted that a cache holds keys of heads, and gives rows that are key and value
    # to the wrong attention. Its rotation on a CPU knows YaRN alone.
    yield Hook(_MLA + "dispatch_attn_forward_method", "replace", native.absorbed, "forward_batch")
    yield Hook("layers.rotary_embedding.factory.get_rope_cpu", "around", native.rope_on_cpu, _ROPE_CPU)


_MEMORY = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_EVERY_MODE: tuple[Hook, ...] = (
    # seeds of draws
    Hook(
        "sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        "after",
        sampling.seeds_of_batch,
        "batch vocab_size",
    ),
    # Rows are no longer than what an indexer of sparse attention chooses whole (`ModelSizes.limit`).
    Hook("configs.model_config.is_deepseek_dsa", "replace", native.never, "config"),
    # weights
    Hook("model_executor.model_runner.ModelRunner.load_model", "around", lifecycle.load_model, ""),
    Hook(
        "model_executor.model_runner.ModelRunner.forward",
        "before",
        lifecycle.before_forward,
        "forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend split_forward_count",
    ),
    Hook(
        "model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk",
        "before",
        lifecycle.before_update,
        "model_path load_format weight_name_filter recapture_cuda_graph",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.check_weights",
        "around",
        lifecycle.check_weights,
        "action allow_quant_error",
    ),
    # pauses
    Hook("managers.scheduler.Scheduler.flush_cache", "around", lifecycle.flush_cache, "empty_cache"),
    Hook("managers.scheduler.Scheduler.process_input_requests", "after", lifecycle.process_input_requests, "recv_reqs"),
    # sleep
    Hook(_MEMORY + "release_memory_occupation", "around", lifecycle.release, "recv_req"),
    Hook(_MEMORY + "resume_memory_occupation", "around", lifecycle.resume, "recv_req"),
    # routes
    Hook(
        "state_capturer.base.BaseHostCache.__init__",
        "replace",
        lifecycle.make_host_cache,
        "num_tokens num_layers topk_size name",
    ),
)


def _patch_importers(
    patch: Callable[[object, object, object], int], original: object, wrapped: object, source_module: object
) -> int:
    """Let SGLang search all modules for importers of a hooked function, but not of a hooked method. No module imports a
    method by its name, and the search would make each start a second longer."""
    return 0 if isinstance(source_module, type) else patch(original, wrapped, source_module)


_IMPORTERS = Hook(
    "plugins.hook_registry._propagate_patch", "around", _patch_importers, "original wrapped source_module"
)
"""The hook on SGLang's own code for hooks. `register` applies it first."""


def install(hooks: Sequence[Hook]) -> None:
    """Register all hooks, and list them in the plugin's report."""
    register(hooks)
    state().hooks = tuple(hook.target for hook in hooks)


def register(hooks: Sequence[Hook]) -> None:
    """Register all hooks with SGLang. Raises `RuntimeError`, and registers none, if a target is not as expected."""
    from sglang.srt.plugins import hook_registry

    changed = (changed_signature(hook.path, hook.parameters) for hook in (_IMPORTERS, *hooks))
    if problems := list(filter(None, changed)):
        version = importlib.metadata.version("sglang")
        raise RuntimeError(
            f"fp8rl plugin: found sglang {version} with other code, expected the code of {SGLANG_VERSION}; nothing was "
            "hooked. Install the locked version:\n" + "\n".join(problems)
        )
    hook_registry._propagate_patch = partial(_patch_importers, hook_registry._propagate_patch)
    for hook in hooks:
        hook_registry.HookRegistry.register(hook.path, hook.function, hook_registry.HookType(hook.kind))
