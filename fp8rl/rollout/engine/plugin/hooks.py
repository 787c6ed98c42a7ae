"""Every place where the plugin reaches into SGLang, with the signature that it expects to find there.

SGLang moves fast. A target whose parameters are not the ones listed here is refused, by name, before anything is
hooked.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial

from fp8rl.numerics.config import NumericsConfig
from fp8rl.rollout.engine.plugin import lifecycle
from fp8rl.rollout.engine.plugin.families import Hook, families, nothing, sides
from fp8rl.rollout.engine.plugin.state import state

SGLANG_VERSION = "0.5.19"


_FP8 = "layers.quantization.fp8."
_MEMORY = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_UPDATER = "model_executor.model_runner_components.weight_updater.WeightUpdater."

# FP8 weights stay as they are in the checkpoint, so that what is served can be compared byte for byte.
_FP8_LAYOUT: tuple[Hook, ...] = (
    Hook(_FP8 + "Fp8LinearMethod.process_weights_after_loading_block_quant", "replace", nothing, "layer"),
    Hook(_FP8 + "Fp8MoEMethod.process_weights_after_loading_block_quant", "replace", nothing, "layer"),
)

_UNPADDED: tuple[Hook, ...] = (
    Hook(
        "model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
        "replace",
        lifecycle.unpadded,
        "model_config load_config tp_size",
    ),
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
    """Let SGLang search all modules for importers of a hooked function, but not for importers of a hooked method: no
    module imports a method by its name, and for ours the search would take a second of each start."""
    return 0 if isinstance(source_module, type) else patch(original, wrapped, source_module)


_IMPORTERS = Hook(
    "plugins.hook_registry._propagate_patch", "around", _patch_importers, "original wrapped source_module"
)
"""This changes how hooks are applied, so `register` puts it in place by itself."""


def hooks_for(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    """Return all hooks of an engine with these numerics, on a GPU or a CPU.

    Exact mode replaces every op. Native mode replaces the draw and, in an FP8 engine, the products on a CPU or the
    quantizer of activations on a GPU (unless the spec has FP32 scales for them, as SGLang does). Both modes correct
    what SGLang gets wrong about a model besides its ops: its loader, its kind of attention.
    """
    of_families = tuple(hook for family in families() for hook in family.hooks(numerics, cuda))
    every = _EVERY_MODE
    if numerics.mode == "exact":
        return (*of_families, *(() if cuda else _UNPADDED), *_FP8_LAYOUT, *every)
    layout = _FP8_LAYOUT if numerics.rollout_spec.quantized else ()
    return (*of_families, *layout, *every)


def provided(hooks: Sequence[Hook]) -> tuple[str, ...]:
    """Return the names, sorted, of the forms of ops that these hooks compute by their definition."""
    computed = {op for hook in hooks for op in hook.provides}
    return tuple(sorted({form.name for form in sides() if form.definition in computed}))


def install(hooks: Sequence[Hook]) -> None:
    """Register all hooks, and list them in the plugin's report."""
    register(hooks)
    state().hooks = tuple(hook.target for hook in hooks)
    state().provides = provided(hooks)


def register(hooks: Sequence[Hook]) -> None:
    """Register all hooks with SGLang, or none. Raises `RuntimeError` naming every target that is not as expected."""
    from sglang.srt.plugins import hook_registry

    problems = [problem for hook in (_IMPORTERS, *hooks) if (problem := _problem(hook))]
    if problems:
        found = importlib.metadata.version("sglang")
        raise RuntimeError(
            f"fp8rl plugin: sglang {found} is not as expected (written for {SGLANG_VERSION}); nothing was hooked:\n"
            + "\n".join(problems)
        )
    hook_registry._propagate_patch = partial(_patch_importers, hook_registry._propagate_patch)
    for hook in hooks:
        hook_registry.HookRegistry.register(hook.path, hook.function, hook_registry.HookType(hook.kind))


def _problem(hook: Hook) -> str | None:
    try:
        target = pkgutil.resolve_name(hook.path)
    except (ImportError, AttributeError) as error:
        return f"  {hook.path}: not found ({error})"
    found = [name for name in inspect.signature(target).parameters if name != "self"]
    expected = hook.parameters.split()
    return None if found == expected else f"  {hook.path}: found the parameters {found}, expected {expected}"
