"""Lowerings as data, against values written by hand from the libraries' documentation."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, optimizer_config

from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import OptimizerSection, TrainerSection
from fp8rl.trainer.megatron.lowering import Lowering, lower, lower_optimizer
from tests.support.lowering import DEFAULT, FP8, FUSED, RECIPE, native
from tests.support.paths import CONFIGS

FP32_SCALES = {f"fp8_quant_{role}.power_2_scale": False for role in ("fwd_inp", "fwd_weight", "bwd_grad")}
OF_FP32 = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "NVTE_BACKWARD_OVERRIDE": None}
OF_BF16 = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": None, "NVTE_BACKWARD_OVERRIDE": "dequantized"}
DEQUANTIZED = {"environment": OF_BF16, "recipe": {**RECIPE, "backward_override": "dequantized"}}


def ends(first: int, last: int) -> dict[str, Any]:
    layers = {"num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    return {"config": {**FP8, "first_last_layers_bf16": True, **layers}}


@pytest.mark.parametrize(
    ("numerics", "changes"),
    [
        (native(), {}),
        (native(preset="fp8_block_fp32"), {"environment": OF_FP32, "recipe": {**RECIPE, **FP32_SCALES}}),
        (
            native(gradient={"format": "e5m2"}),
            {"config": {**FP8, "fp8": "hybrid"}, "recipe": {**RECIPE, "fp8_format.name": "HYBRID"}},
        ),
        (native("fp8_forward", gradient={"format": "e5m2"}), DEQUANTIZED),
        (native(gradient={"format": "bf16"}), DEQUANTIZED),
        (native(first_layers_bf16=1, last_layers_bf16=2), ends(1, 2)),
        (native(last_layers_bf16=1), ends(0, 1)),
    ],
)
def test_what_differs_from_the_default(numerics: NumericsConfig, changes: dict[str, Any]) -> None:
    assert lower(numerics, True) == replace(DEFAULT, **changes)


def mxfp8(**changes: Any) -> NumericsConfig:
    scales = {role: {"scale": "pow2"} for role in ("weight", "activation", "gradient")}
    return native(rollout="bf16", preset="mxfp8", **scales | changes)


def test_mxfp8_is_a_recipe_of_its_own() -> None:
    """TransformerEngine rounds scales up, so that nothing is clipped; OCP's rule, which the preset has, may clip."""
    found = lower(mxfp8(), True)
    assert (found.recipe_kind, found.row_multiple, found.ddp) == ("MXFP8BlockScaling", 32, {})
    without = {key: value for key, value in FP8.items() if key != "fp8_param"}
    assert found.config == without | {"fp8_recipe": "mxfp8"}
    assert found.recipe == {"fp8_format.name": "E4M3", "fp8_dpa": False, "fp8_mha": False, "backward_override": None}
    with pytest.raises(UserError, match="numerics.weight.scale: found 'e8m0', expected pow2, .*MXFP8BlockScaling"):
        lower(native(rollout="bf16", preset="mxfp8"), True)
    with pytest.raises(UserError, match="numerics.activation.group: found 128, expected 32"):
        lower(mxfp8(activation={"scale": "pow2", "group": 128}), True)


def test_nothing_is_lowered_in_exact_mode_or_without_transformer_engine_nor_fp8_of_a_bf16_trainer() -> None:
    assert lower(NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2")), True) == Lowering()
    assert lower(native(), False) == Lowering()
    assert lower(native(weight={"granularity": "channel"}, rollout="bf16"), False) == Lowering()
    for numerics in (native("bf16"), native("bf16", "bf16", "bf16")):
        assert lower(numerics, True) == Lowering(transformer_engine=True, config=FUSED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"weight": {"granularity": "channel"}}, "numerics.weight.granularity: found 'channel', expected block, because"),
     ({"weight": {"format": "e5m2"}}, "numerics.weight.format: found 'e5m2', expected e4m3"),
     ({"activation": {"group": 32}}, "numerics.activation.group: found 32, expected 128"),
     ({"gradient": {"scale": "fp32"}}, "numerics.gradient.scale: found 'fp32', expected pow2"),
     ({"activation": {"fixed": 224.0}}, "numerics.activation.fixed: found 224.0, expected null, because"),
     ({"gradient": {"rounding": "stochastic"}}, "numerics.gradient.rounding: found 'stochastic', expected nearest"),
     ({"scope": ["o_proj"]}, r"numerics.scope: found \['o_proj'\], expected all module kinds")],
)  # fmt: skip
def test_what_transformer_engine_does_not_compute_is_refused(changes: dict[str, Any], said: str) -> None:
    numerics = native(rollout="bf16", **changes)
    with pytest.raises(UserError, match=said + ".*numerics.mode=exact"):
        lower(numerics, True)
    assert lower(replace(numerics, trainer="bf16"), True).recipe is None


@pytest.mark.slow
def test_the_config_is_one_that_megatron_takes(layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Megatron believes that TransformerEngine is there."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import transformer_config as megatron_config

    from fp8rl.trainer.megatron.model import transformer_config

    monkeypatch.setattr(megatron_config, "is_te_min_version", lambda *_, **__: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    lowering = lower(native(first_layers_bf16=1, gradient={"format": "e5m2"}), True)
    config = transformer_config(
        read_model(CONFIGS / "qwen3_30b_a3b"), TrainerSection(), torch.bfloat16, "native", lowering
    )
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("hybrid", "blockwise", True)
    assert [is_first_last_bf16_layer(config, layer) for layer in range(4)] == [True, False, False, False]
    assert DistributedDataParallelConfig(**lowering.ddp).fp8_param_gather
    assert OptimizerConfig(**lowering.optimizer).fp8_recipe == "blockwise"
    for name in ("deepseek_v3", "glm_4_7_flash", "moonlight_16b_a3b"):
        model = read_model(CONFIGS / name)
        config = transformer_config(model, TrainerSection(), torch.bfloat16, "native", lowering)
        assert not config.apply_rope_fusion


def memory(fp8: bool = False, transformer_engine: bool = True, cuda: bool = True, **keys: Any) -> dict[str, Any]:
    return lower_optimizer(OptimizerSection(**keys), fp8, cuda=cuda, transformer_engine=transformer_engine)


def test_the_optimizers_memory_keys_in_megatrons_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = memory(offload=True)
    names = {"use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction"}
    assert asked == dict.fromkeys(names, 1)
    monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda version: True)
    known = OptimizerConfig(bf16=True, use_distributed_optimizer=True, **asked)
    # Else Megatron clones FP32 masters on the GPU, and the offloading optimizer only copies them.
    assert known.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    in_bf16 = memory(moments="bf16")
    assert in_bf16.keys() <= {field.name for field in fields(OptimizerConfig)}
    assert in_bf16["exp_avg_dtype"] == in_bf16["exp_avg_sq_dtype"] == torch.bfloat16
    assert not in_bf16["store_param_remainders"] and "main_params_dtype" not in in_bf16
    assert memory(True) == memory(offload=True, cuda=False, transformer_engine=False) == {}


@pytest.mark.parametrize(
    ("keys", "fp8", "said"),
    [
        ({"offload": True}, True, "trainer.optimizer.offload: found 'true with weights .*Megatron-LM#2407"),
        ({"offload": True}, False, "trainer.optimizer.offload: found 'true without TransformerEngine'"),
        ({"moments": "bf16"}, False, "trainer.optimizer.moments: found 'bf16', expected fp32 where"),
        ({"moments": "bf16", "offload": True}, False, "found moments=bf16 with offload=true"),
    ],
)
def test_what_megatrons_optimizer_cannot_do_is_refused(keys: dict[str, Any], fp8: bool, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        memory(fp8, fp8, **keys)
