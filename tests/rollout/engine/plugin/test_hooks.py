"""Hooks: all or none, and none into a method that is not the one they were written for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.files import changed_signature
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine import plugin
from fp8rl.rollout.engine.plugin import hooks, state
from fp8rl.rollout.engine.plugin.hooks import Hook, hooks_for, install

registry = pytest.importorskip("sglang.srt.plugins.hook_registry")

FP8 = QuantSpec.preset("fp8_block_pow2")


def hooked(*_: Any) -> None:
    raise AssertionError("never applied here")


# Targets that are cheap to import.
GOOD = Hook("plugins.hook_registry.HookRegistry.apply_hooks", "after", hooked, "")
ALSO_GOOD = Hook("plugins.load_plugins_by_group", "around", hooked, "group excluded_dists")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is registered with SGLang, in a process that is configured."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(registry.HookRegistry, "register", lambda *call: calls.append(call))
    monkeypatch.setattr(state, "_state", None)
    state.configure(NumericsConfig(spec=FP8))
    return calls


def test_hooks_that_fit_are_registered_and_reported(registered: list[tuple[Any, ...]]) -> None:
    install([GOOD, ALSO_GOOD])
    assert registered == [
        ("sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks", hooked, registry.HookType.AFTER),
        ("sglang.srt.plugins.load_plugins_by_group", hooked, registry.HookType.AROUND),
    ]
    assert state.state().hooks == (GOOD.target, ALSO_GOOD.target)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Hook(ALSO_GOOD.target, "around", hooked, "group"), "'group excluded_dists', expected 'group'"),
        (Hook(ALSO_GOOD.target, "around", hooked, "excluded_dists group"), "expected 'excluded_dists group'"),
        (Hook("plugins.load_plugins_by_name", "around", hooked, "group"), "load_plugins_by_name: not found"),
        (Hook("plugins.nowhere.f", "around", hooked, ""), "nowhere.f: not found"),
    ],
)
def test_one_hook_that_does_not_fit_and_nothing_is_hooked(
    registered: list[tuple[Any, ...]], bad: Hook, said: str
) -> None:
    with pytest.raises(RuntimeError, match="nothing was hooked") as error:
        install([GOOD, bad, ALSO_GOOD, Hook("plugins.missing", "after", hooked, "")])
    assert registered == []
    assert state.state().hooks == ()
    assert error.match(said) and error.match("missing: not found")
    assert error.match(hooks.SGLANG_VERSION)
    assert GOOD.path not in str(error.value)


NUMERICS = [
    NumericsConfig(mode=mode, spec=QuantSpec.preset(preset), rollout=rollout)
    for mode in ("exact", "native")
    for preset in ("fp8_block_pow2", "fp8_block_fp32")
    for rollout in ("fp8", "bf16")
]
NUMERICS.append(NumericsConfig(spec=FP8, kv="fp8"))
FP8_LAYER = "layers.quantization.fp8.Fp8{}Method."
SCALES = {"models.llama.LlamaForCausalLM.load_weights"}
"""Of FP8 blocks, which SGLang's Llama drops."""
LAYOUTS = {FP8_LAYER.format(kind) + "process_weights_after_loading_block_quant" for kind in ("Linear", "MoE")}
DRAW = {"layers.sampler.Sampler._sample_from_probs"}
VECTORS = {f"models.qwen3_{net}GatedDeltaNet.__init__" for net in ("next.Qwen3", "5.Qwen3_5")}
"""Of linear attention, which are FP32 in any mode."""
QUANTIZERS = {
    f"kernels.ops.quantization.fp8_kernel.{name}"
    for name in ("_run_per_token_group_quant_8bit_kernel", "sglang_per_token_quant_fp8")
}


@pytest.mark.parametrize("cuda", [False, True])
def test_every_target_is_in_the_installed_sglang_with_its_parameters_and_hooked_once(cuda: bool) -> None:
    for numerics in NUMERICS:
        found = hooks_for(numerics, cuda)
        assert {changed_signature(hook.path, hook.parameters) for hook in found} == {None}
        assert len({hook.target for hook in found}) == len(found)


def ops_hooked(cuda: bool, **numerics: Any) -> set[str]:
    targets = {hook.target for hook in hooks_for(NumericsConfig(**{"spec": FP8, **numerics}), cuda)}
    return {target for target in targets if target.startswith(("layers.", "kernels.", "models."))}


def test_native_mode_on_a_gpu_hooks_the_draw_and_the_quantizer_of_powers_of_two() -> None:
    assert ops_hooked(True, mode="native") == DRAW | QUANTIZERS | LAYOUTS | SCALES | VECTORS
    assert ops_hooked(True, mode="native", spec=QuantSpec.preset("fp8_block_fp32")) == DRAW | LAYOUTS | SCALES | VECTORS
    assert ops_hooked(True, mode="native", rollout="bf16") == DRAW | VECTORS


@pytest.mark.parametrize("cuda", [False, True])
def test_exact_mode_reaches_into_sglangs_sampler_and_into_no_model_or_layer_beside(cuda: bool) -> None:
    assert ops_hooked(cuda) == {
        "layers.sampler.Sampler.forward",
        "layers.logprob_processor.InputLogprobProcessor.forward",
    }
    assert len(hooks_for(NumericsConfig(spec=FP8), cuda)) <= 17


def test_sglang_quantizes_every_activation_on_hopper_where_it_is_hooked() -> None:
    """Dense products through DeepGEMM or Triton and the experts' Triton runner: all come by the two functions."""
    from sglang.kernels.ops.moe import fused_moe_triton_kernels as experts
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers.quantization import fp8_utils

    renamed = "if _is_cuda:\n    per_token_group_quant_fp8 = sglang_per_token_group_quant_fp8"
    for caller, part in (
        (fp8_kernel.sglang_per_token_group_quant_fp8, "_run_per_token_group_quant_8bit_kernel("),
        (fp8_kernel.sglang_per_token_group_quant_fp8, "return sglang_per_token_quant_fp8(x)"),
        (fp8_kernel, renamed),
        (fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback, "per_token_group_quant_fp8("),
        (fp8_utils.triton_w8a8_block_fp8_linear, "per_token_group_quant_fp8("),
        (experts.invoke_fused_moe_kernel, "per_token_group_quant_fp8("),
    ):
        assert part in inspect.getsource(caller)


def test_without_a_configuration_the_plugin_does_nothing(
    registered: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock SGLang in the same environment stays stock."""
    monkeypatch.delenv(plugin.CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(state, "_state", None)
    plugin.register()
    assert registered == []
    with pytest.raises(RuntimeError, match="not configured in this process"):
        state.state()
