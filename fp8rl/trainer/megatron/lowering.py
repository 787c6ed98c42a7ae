"""Translates a run's numerics into settings of TransformerEngine and Megatron, for native mode on a GPU.

This is pure data. TransformerEngine 2.20's recipe `Float8BlockScaling` is the spec of `fp8_block_*`: activations and
gradients in 1x128 groups, weights in 128x128 blocks, split accumulators. It reads an environment variable at import to
choose FP32 or power-of-two scales. Megatron 0.16.1 passes only the format to the recipe. `MXFP8BlockScaling`, for
Blackwell, has 1x32 groups for all tensors. Its scale is the power of two at which nothing clips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.spec import ALL, QuantSpec, Scale, TensorSpec
from fp8rl.trainer.config import OptimizerSection

BLOCKS, MX = "Float8BlockScaling", "MXFP8BlockScaling"
FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
BACKWARD = "NVTE_BACKWARD_OVERRIDE"

_BLOCK, _MX_GROUP = 128, 32
_SCALES: tuple[Scale, ...] = ("pow2", "fp32")
_ROWS = 16
"""Every dimension of an FP8 product, also the number of tokens, must be a multiple of this number."""


@dataclass(frozen=True)
class Lowering:
    """The settings of Megatron and TransformerEngine. They are empty in exact mode and without TransformerEngine."""

    transformer_engine: bool = False
    """Whether the layers are TransformerEngine's."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of Megatron's TransformerConfig."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of Megatron's DistributedDataParallelConfig."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of Megatron's OptimizerConfig."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables that TransformerEngine reads at import. None: the variable must not be set."""
    recipe: Mapping[str, Any] | None = None
    """Fields of the recipe that Megatron must make from these settings, by dotted name. None without FP8."""
    recipe_kind: str = BLOCKS
    """The name of the recipe's class."""
    row_multiple: int = 1
    """The number of tokens in a micro-batch must be a multiple of this number, on each tensor-parallel rank."""


def lower(numerics: NumericsConfig, transformer_engine: bool) -> Lowering:
    """Return the lowering of a run. transformer_engine: whether the machine has TransformerEngine and a GPU. Raises
    UserError: TransformerEngine cannot run this spec."""
    if numerics.mode == "exact" or not transformer_engine:
        return Lowering()
    # Fused kernels of Megatron and TransformerEngine for SwiGLU and the rotary embedding.
    fused = {"bias_activation_fusion": True, "apply_rope_fusion": True}
    spec = numerics.trainer_spec
    if not spec.quantized:
        return Lowering(transformer_engine=True, config=fused)
    mx = by_mx(spec)
    _check(spec, mx)
    backward = numerics.trainer == "fp8" and spec.gradient.quantized
    hybrid = backward and spec.gradient.format == "e5m2"
    pow2 = spec.weight.scale == "pow2"
    # Operands of the forward, dequantized: the gradient of the quantized forward with BF16 products.
    override = None if backward else "dequantized"
    layers = {
        "first_last_layers_bf16": bool(spec.first_layers_bf16 or spec.last_layers_bf16),
        "num_layers_at_start_in_bf16": spec.first_layers_bf16,
        "num_layers_at_end_in_bf16": spec.last_layers_bf16,
    }
    config = {**fused, "fp8": "hybrid" if hybrid else "e4m3", **layers}
    recipe: dict[str, Any] = {
        "fp8_format.name": "HYBRID" if hybrid else "E4M3",
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": override,
    }
    if mx:  # Megatron gathers such weights in FP8 only into the gradients' buffer: they stay in BF16
        return Lowering(
            transformer_engine=True,
            config=config | {"fp8_recipe": "mxfp8"},
            environment={BACKWARD: override},
            recipe=recipe,
            recipe_kind=MX,
            row_multiple=_MX_GROUP,
        )
    for role in ("fwd_inp", "fwd_weight", "bwd_grad"):
        recipe |= {f"fp8_quant_{role}.power_2_scale": pow2, f"fp8_quant_{role}.amax_epsilon": 0.0}
    recipe |= {f"fp8_gemm_{product}.use_split_accumulator": True for product in ("fprop", "dgrad", "wgrad")}
    return Lowering(
        transformer_engine=True,
        config=config | {"fp8_recipe": "blockwise", "fp8_param": True},
        ddp={"fp8_param_gather": True},
        optimizer={"fp8_recipe": "blockwise"},
        environment={FP32_SCALES: None if pow2 else "1", BACKWARD: override},
        recipe=recipe | {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1},
        row_multiple=_ROWS,
    )


def by_mx(spec: QuantSpec) -> bool:
    """Return True if a spec's weight groups need `MXFP8BlockScaling`, TransformerEngine's recipe for Blackwell."""
    return spec.weight.granularity == "token_group" and spec.weight.group == _MX_GROUP


def _check(spec: QuantSpec, mx: bool) -> None:
    """Raise `UserError` if the recipe does not have a setting of the spec. mx: the recipe is MXFP8BlockScaling."""
    group, recipe = (_MX_GROUP, MX) if mx else (_BLOCK, BLOCKS)
    offered: dict[str, dict[str, tuple[object, ...]]] = {
        "weight": {"format": ("e4m3",), "granularity": ("token_group" if mx else "block",)},
        "activation": {"format": ("e4m3",), "granularity": ("token_group",)},
        "gradient": {"format": ("e4m3", "e5m2"), "granularity": ("token_group",)},
    }
    possible = _SCALES[:1] if mx else _SCALES
    scales = (spec.weight.scale,) if spec.weight.scale in possible else possible
    for role, fields in offered.items():
        tensor: TensorSpec = getattr(spec, role)
        if not tensor.quantized:  # a gradient
            continue
        alike = {"group": (group,), "scale": scales, "fixed": (None,), "rounding": ("nearest",)}
        for name, choices in {**fields, **alike}.items():
            if (found := getattr(tensor, name)) not in choices:
                expected = " or ".join("null" if choice is None else str(choice) for choice in choices)
                raise _refusal(f"numerics.{role}.{name}", found, expected, recipe)
    if spec.scope != ALL:
        raise _refusal("numerics.scope", sorted(spec.scope), "all module kinds", recipe)


def _refusal(key: str, found: object, expected: str, recipe: str) -> UserError:
    return user_error(
        key,
        found=found,
        expected=f"{expected}, because in native mode TransformerEngine computes FP8 products by {recipe}, with one "
        "type of scale for all roles",
        remedy="Change it, or set numerics.mode=exact.",
    )


# The keys of `trainer.optimizer` in the words of Megatron's OptimizerConfig (0.16.1). Pure data.


def lower_optimizer(
    memory: OptimizerSection, fp8_parameters: bool, cuda: bool, transformer_engine: bool
) -> dict[str, Any]:
    """Return keywords of OptimizerConfig for masters and moments that are not all in FP32 on the device.

    fp8_parameters: whether TransformerEngine stores weights in FP8. cuda: whether there is a GPU. Without one the
    optimizer is on the host already.

    Raises UserError: Megatron does not support this combination.
    """
    if memory.offload and fp8_parameters:
        raise user_error(
            "trainer.optimizer.offload",
            found="true with weights that TransformerEngine stores and gathers in FP8, as in native mode",
            expected="false, because Megatron would leave FP8 weights stale (Megatron-LM#2407, #2582, #2788)",
            remedy="Set trainer.optimizer.offload=false (moments=bf16 saves 4 bytes a parameter), "
            "numerics.trainer=bf16, or numerics.mode=exact.",
        )
    if memory.moments == "bf16" and not transformer_engine:
        expected = "fp32 where there is no GPU or no TransformerEngine. Only TransformerEngine's Adam has BF16 moments"
        remedy = "Set trainer.optimizer.moments=fp32 here, or install requirements/gpu.txt beside a GPU."
        raise user_error("trainer.optimizer.moments", "bf16", expected, remedy)
    if memory.offload and cuda and not transformer_engine:
        expected = "TransformerEngine, which Megatron's optimizer needs to offload masters from a GPU to the host"
        remedy = "Install requirements/gpu.txt, or set trainer.optimizer.offload=false."
        raise user_error("trainer.optimizer.offload", "true without TransformerEngine", expected, remedy)
    # Precision-aware, the optimizer makes the masters itself: else Megatron keeps FP32 ones on the GPU besides.
    if memory.offload and cuda:
        return {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    if memory.moments == "bf16":
        return {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
            "store_param_remainders": False,  # masters are FP32 tensors, as without this key
        }
    return {}
