"""The text model of Qwen3.5, dense: gated delta rules in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from dataclasses import replace

from fp8rl.models.architectures import qwen3_next
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import gated_delta, mlp
from fp8rl.models.multimodal import Multimodal
from fp8rl.models.sizes import ModelSizes


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of Qwen3_5TextConfig. Numbers of heads must be present."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        config.size(name)  # refuses a file without it
    return ModelSizes(**qwen3_next.hybrid_sizes(config), ffn_size=config.size("intermediate_size"))


ARCHITECTURE = replace(
    qwen3_next.ARCHITECTURE,
    name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    sizes=sizes,
    families=(gated_delta.APART, qwen3_next.GATED_ATTENTION, mlp.DENSE),
    multimodal=Multimodal(name="Qwen3_5ForConditionalGeneration", model_type="qwen3_5"),
)
