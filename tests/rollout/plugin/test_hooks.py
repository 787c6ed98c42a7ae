"""Hooks: all or none, and none into a method that is not the one they were written for."""

from __future__ import annotations

from typing import Any

import pytest

from numerics.config import NumericsConfig
from numerics.errors import UserError
from numerics.spec import QuantSpec
from rollout import plugin
from rollout.plugin import engine, hooks
from rollout.plugin.hooks import Hook, hooks_for, install

registry = pytest.importorskip("sglang.srt.plugins.hook_registry")

FP8 = QuantSpec.preset("fp8_block_pow2")

# Targets that are cheap to import; what is hooked into them is never applied here.
GOOD = Hook("plugins.hook_registry.HookRegistry.apply_hooks", "after", print, "")
ALSO_GOOD = Hook("plugins.load_plugins_by_group", "around", print, "group excluded_dists")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is registered with SGLang, in a process that is configured."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(registry.HookRegistry, "register", lambda *call: calls.append(call))
    monkeypatch.setattr(engine, "_state", None)
    engine.configure(NumericsConfig(spec=FP8))
    return calls


def test_hooks_that_fit_are_registered_and_reported(registered: list[tuple[Any, ...]]) -> None:
    install([GOOD, ALSO_GOOD])
    assert registered == [
        ("sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks", print, registry.HookType.AFTER),
        ("sglang.srt.plugins.load_plugins_by_group", print, registry.HookType.AROUND),
    ]
    assert engine.state().hooks == (GOOD.target, ALSO_GOOD.target)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Hook(ALSO_GOOD.target, "around", print, "group"), r"\['group', 'excluded_dists'\], expected \['group'\]"),
        (Hook(ALSO_GOOD.target, "around", print, "excluded_dists group"), r"expected \['excluded_dists', 'group'\]"),
        (Hook("plugins.load_plugins_by_name", "around", print, "group"), "load_plugins_by_name: not found"),
        (Hook("plugins.nowhere.f", "around", print, ""), "nowhere.f: not found"),
    ],
)
def test_one_hook_that_does_not_fit_and_nothing_is_hooked(
    registered: list[tuple[Any, ...]], bad: Hook, said: str
) -> None:
    with pytest.raises(RuntimeError, match="nothing was hooked") as error:
        install([GOOD, bad, ALSO_GOOD])
    assert registered == []
    assert engine.state().hooks == ()
    assert error.match(said)
    assert error.match(hooks.SGLANG_VERSION)
    assert GOOD.path not in str(error.value)


def test_all_that_do_not_fit_are_named(registered: list[tuple[Any, ...]]) -> None:
    bad = [Hook(f"plugins.missing_{index}", "after", print, "") for index in range(2)]
    with pytest.raises(RuntimeError, match=r"missing_0: not found[^\n]*\n.*missing_1: not found"):
        install(bad)


@pytest.mark.parametrize("rollout", ["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["exact", "native"])
def test_targets_are_hooked_once(mode: str, rollout: str) -> None:
    targets = [hook.target for hook in hooks_for(NumericsConfig(mode=mode, spec=FP8, rollout=rollout))]
    assert len(set(targets)) == len(targets)


def test_native_mode_hooks_no_op_but_the_fp8_products() -> None:
    def ops_hooked(**numerics: str) -> set[str]:
        targets = {hook.target for hook in hooks_for(NumericsConfig(spec=FP8, **numerics))}
        return {target.removeprefix("layers.") for target in targets if target.startswith("layers.")}

    products = {f"quantization.fp8.Fp8{kind}Method.apply" for kind in ("Linear", "MoE")}
    layouts = {
        f"quantization.fp8.Fp8{kind}Method.process_weights_after_loading_block_quant" for kind in ("Linear", "MoE")
    }
    assert ops_hooked(mode="native", rollout="fp8") == products | layouts
    assert ops_hooked(mode="native", rollout="bf16") == set()
    assert ops_hooked(mode="exact", rollout="bf16") > products | layouts


def test_without_a_configuration_the_plugin_does_nothing(
    registered: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock SGLang in the same environment stays stock."""
    monkeypatch.delenv(plugin.CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(engine, "_state", None)
    plugin.register()
    assert registered == []
    with pytest.raises(RuntimeError, match="not configured in this process"):
        engine.state()


@pytest.mark.parametrize("text", ["not json", "{}", '{"numerics": {"mode": "exact"}}'])
def test_a_malformed_configuration_hooks_nothing(
    registered: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(plugin.CONFIG_VARIABLE, text)
    with pytest.raises((ValueError, KeyError, UserError)):
        plugin.register()
    assert registered == []
