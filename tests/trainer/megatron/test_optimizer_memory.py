"""The optimizer's memory keys in Megatron's words, as data; what Megatron cannot do is refused by name."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, optimizer_config

from fp8rl.numerics.core.errors import UserError
from fp8rl.trainer.config import OptimizerSection
from fp8rl.trainer.megatron.lowering import lower_optimizer


def test_offload_moves_masters_and_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = lower_optimizer(OptimizerSection(offload=True), False, cuda=True, transformer_engine=True)
    assert asked == {
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
    }
    monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda version: True)
    known = OptimizerConfig(bf16=True, use_distributed_optimizer=True, **asked)  # type: ignore[arg-type]
    # Else Megatron clones FP32 masters on the GPU, and the offloading optimizer only copies them.
    assert known.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    assert lower_optimizer(OptimizerSection(offload=True), False, cuda=False, transformer_engine=False) == {}


def test_bf16_moments_leave_fp32_masters() -> None:
    asked = lower_optimizer(OptimizerSection(moments="bf16"), False, cuda=True, transformer_engine=True)
    assert asked.keys() <= {field.name for field in fields(OptimizerConfig)}
    assert asked["exp_avg_dtype"] == asked["exp_avg_sq_dtype"] == torch.bfloat16
    assert not asked["store_param_remainders"] and "main_params_dtype" not in asked


def test_defaults_ask_for_nothing() -> None:
    assert lower_optimizer(OptimizerSection(), True, cuda=True, transformer_engine=True) == {}


@pytest.mark.parametrize(
    ("memory", "fp8", "said"),
    [
        (
            OptimizerSection(offload=True),
            True,
            "trainer.optimizer.offload: found 'true with weights .*Megatron-LM#2407",
        ),
        (OptimizerSection(offload=True), False, "trainer.optimizer.offload: found 'true without TransformerEngine'"),
        (OptimizerSection(moments="bf16"), False, "trainer.optimizer.moments: found 'bf16', expected fp32 where"),
    ],
)
def test_what_megatron_cannot_do_is_refused(memory: OptimizerSection, fp8: bool, said: str) -> None:
    with pytest.raises(UserError, match=said):
        lower_optimizer(memory, fp8, cuda=True, transformer_engine=fp8)


def test_bf16_moments_on_the_host_are_refused() -> None:
    with pytest.raises(ValueError, match="found moments=bf16 with offload=true"):
        OptimizerSection(moments="bf16", offload=True)
