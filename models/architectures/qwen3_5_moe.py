"""Qwen3.5 with experts, the model of its text: Qwen3-Next whose linear attention has matrices of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8rl.models.architecture import CACHE_SCALES, Architecture
from fp8rl.models.architectures.qwen3_next import (
    GATED_ATTENTION,
    GATED_MOE,
    engine_config,
    expert_sizes,
    hybrid_sizes,
    tiny_config,
    tiny_experts,
)
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import gated_delta
from fp8rl.models.sizes import ModelSizes, checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fp8rl.models.tiny import TinyModel


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Qwen3_5MoeTextConfig."""
    return checked(config, ModelSizes(**hybrid_sizes(config), **expert_sizes(config, 256, 8)))


def tiny(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**tiny_config(shape, common), **tiny_experts(shape)))


ARCHITECTURE = Architecture(
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    sizes=sizes,
    families=(gated_delta.APART, GATED_ATTENTION, GATED_MOE),
    tiny=tiny,
    engine_extras=CACHE_SCALES,
    engine_config=engine_config,
)
