"""The process that TransformerEngine runs in: its environment, the check of its recipe, and a live change."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.megatron.lowering import BACKWARD, FP32_SCALES, Lowering, lower
from tests.support.lowering import DEFAULT, native


class Float8BlockScaling:
    """The fields of TransformerEngine's recipe of this name, as TransformerEngine 2.20.2 has them by default."""

    def __init__(self, pow2: bool = True, form: str = "E4M3", backward_override: str | None = None) -> None:
        self.fp8_format = SimpleNamespace(name=form)
        scales = SimpleNamespace(power_2_scale=pow2, amax_epsilon=0.0)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = scales
        self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim = 1, 2, 1
        split = SimpleNamespace(use_split_accumulator=True)
        self.fp8_gemm_fprop = self.fp8_gemm_dgrad = self.fp8_gemm_wgrad = split
        self.fp8_dpa = self.fp8_mha = False
        self.backward_override = backward_override


def test_the_environment_is_set_and_cleared_until_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FP32_SCALES, "1")
    monkeypatch.setenv(BACKWARD, "high_precision")
    te_runtime.prepare(Lowering())
    assert (os.environ[FP32_SCALES], os.environ[BACKWARD]) == ("1", "high_precision")
    te_runtime.prepare(DEFAULT)
    assert FP32_SCALES not in os.environ and BACKWARD not in os.environ
    te_runtime.prepare(lower(native("fp8_forward", preset="fp8_block_fp32"), True))
    assert (os.environ[FP32_SCALES], os.environ[BACKWARD]) == ("1", "dequantized")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    te_runtime.prepare(DEFAULT)
    assert os.environ[FP32_SCALES] == "1"


def test_the_recipe_that_was_lowered_passes() -> None:
    te_runtime.compare(DEFAULT, Float8BlockScaling())
    hybrid = lower(native("fp8", preset="fp8_block_fp32", gradient={"format": "e5m2"}), True)
    te_runtime.compare(hybrid, Float8BlockScaling(pow2=False, form="HYBRID"))


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        (Float8BlockScaling(pow2=False), "'fp8_quant_fwd_weight.power_2_scale': False"),
        (Float8BlockScaling(form="HYBRID"), "{'fp8_format.name': 'HYBRID'}"),
        (Float8BlockScaling(backward_override="high_precision"), "{'backward_override': 'high_precision'}"),
        (SimpleNamespace(), "'SimpleNamespace'"),
        (None, "'NoneType'"),
    ],
)
def test_another_recipe_is_refused_with_its_settings(recipe: Any, found: str) -> None:
    with pytest.raises(UserError) as error:
        te_runtime.compare(replace(DEFAULT, environment={FP32_SCALES: "1", BACKWARD: None}), recipe)
    assert found in str(error.value)
    assert f"start the process with {FP32_SCALES}=1 {BACKWARD} unset" in str(error.value)


def test_a_live_model_falls_back_to_bf16_and_returns_and_takes_no_other_fp8() -> None:
    config: Any = SimpleNamespace(fp8="e4m3")
    for numerics, fp8 in ((native("bf16"), None), (native(), "e4m3")):
        te_runtime.switch(DEFAULT, lower(numerics, True), config)
        assert config.fp8 == fp8
    in_bf16 = replace(DEFAULT, config={}, recipe=None)
    for before, changes in (
        (DEFAULT, {"preset": "fp8_block_fp32"}),
        (DEFAULT, {"first_layers_bf16": 1}),
        (in_bf16, {}),
    ):
        with pytest.raises(UserError, match="Start a new trainer"):
            te_runtime.switch(before, lower(native(**changes), True), config)
        te_runtime.switch(Lowering(), lower(native(**changes), False), config)
    assert config.fp8 == "e4m3"
