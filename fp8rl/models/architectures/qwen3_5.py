"""Qwen3.5, dense, the model of its text: gated delta rules in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8rl.models.architectures import qwen3_next
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import gated_delta, mlp
from fp8rl.models.multimodal import Multimodal
from fp8rl.models.sizes import ModelSizes, checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fp8rl.models.tiny import TinyModel


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' Qwen3_5TextConfig, but for numbers of heads and widths."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        config.size(name)  # refuses a file without it
    return checked(config, ModelSizes(**qwen3_next.hybrid_sizes(config), ffn_size=config.size("intermediate_size")))


def tiny(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Dense, whatever the number of experts."""
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    own = qwen3_next.tiny_config(shape, common)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**own, intermediate_size=shape.intermediate))


ARCHITECTURE = replace(
    qwen3_next.ARCHITECTURE,
    name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    sizes=sizes,
    families=(gated_delta.APART, qwen3_next.GATED_ATTENTION, mlp.DENSE),
    tiny=tiny,
    multimodal=Multimodal(name="Qwen3_5ForConditionalGeneration", model_type="qwen3_5"),
)
