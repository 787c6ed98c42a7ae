"""The default lowering, by hand from the libraries' documentation."""

from typing import Any

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.megatron.lowering import Lowering

FUSED = {"bias_activation_fusion": True, "apply_rope_fusion": True}
# Megatron 0.16.1: TransformerConfig.
FP8 = {
    **FUSED, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True, "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0,
}  # fmt: skip
# TransformerEngine 2.20.2: what `Float8BlockScaling()` has without any environment variable.
QUANTIZERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
RECIPE = {
    "fp8_format.name": "E4M3",
    **{
        f"{each}.{key}": value for each in QUANTIZERS for key, value in (("power_2_scale", True), ("amax_epsilon", 0.0))
    },
    "x_block_scaling_dim": 1,
    "w_block_scaling_dim": 2,
    "grad_block_scaling_dim": 1,
    **{f"fp8_gemm_{each}.use_split_accumulator": True for each in ("fprop", "dgrad", "wgrad")},
    "fp8_dpa": False,
    "fp8_mha": False,
    "backward_override": None,
}
DEFAULT = Lowering(
    transformer_engine=True, config=FP8, ddp={"fp8_param_gather": True}, optimizer={"fp8_recipe": "blockwise"},
    environment={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": None, "NVTE_BACKWARD_OVERRIDE": None}, recipe=RECIPE,
    row_multiple=16,
)  # fmt: skip


def native(
    trainer: str = "fp8", rollout: str = "fp8", preset: str = "fp8_block_pow2", **changes: Any
) -> NumericsConfig:
    spec = QuantSpec.preset(preset).override(changes)
    return NumericsConfig(mode="native", spec=spec, trainer=trainer, rollout=rollout)
