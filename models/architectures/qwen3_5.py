"""Qwen3.5, dense, the model of its text: gated delta rules in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8rl.models.architecture import CACHE_SCALES, Architecture
from fp8rl.models.architectures.qwen3_next import GATED_ATTENTION, engine_config, hybrid_sizes, tiny_config
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import gated_delta, mlp
from fp8rl.models.sizes import ModelSizes, checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fp8rl.models.tiny import TinyModel


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Qwen3_5TextConfig, but for numbers of heads and widths."""
    config.size("num_attention_heads"), config.size("num_key_value_heads")
    return checked(config, ModelSizes(**hybrid_sizes(config), ffn_size=config.size("intermediate_size")))


def tiny(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Dense, whatever the number of experts."""
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    own = tiny_config(shape, common)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**own, intermediate_size=shape.intermediate))


ARCHITECTURE = Architecture(
    name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    sizes=sizes,
    families=(gated_delta.APART, GATED_ATTENTION, mlp.DENSE),
    tiny=tiny,
    engine_extras=CACHE_SCALES,
    engine_config=engine_config,
)
