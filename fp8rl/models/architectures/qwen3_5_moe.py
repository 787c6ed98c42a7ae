"""The text model of Qwen3.5 with experts: Qwen3-Next, with linear attention whose matrices are not joined."""

from __future__ import annotations

from dataclasses import replace

from fp8rl.models.architectures import qwen3_next
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import gated_delta
from fp8rl.models.multimodal import Multimodal
from fp8rl.models.sizes import ModelSizes


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. Absent keys have the defaults of transformers' Qwen3_5MoeTextConfig."""
    return ModelSizes(**qwen3_next.hybrid_sizes(config), **qwen3_next.expert_sizes(config, 256, 8))


ARCHITECTURE = replace(
    qwen3_next.ARCHITECTURE,
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    sizes=sizes,
    families=(gated_delta.APART, qwen3_next.GATED_ATTENTION, qwen3_next.GATED_MOE),
    multimodal=Multimodal(
        name="Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe",
        stacked={".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)},
    ),
)
