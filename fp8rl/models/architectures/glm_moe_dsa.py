"""GLM-5: DeepSeek-V3.2 in other sizes, in which layers may share what an indexer has chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8rl.models.architectures import deepseek_v3, deepseek_v32
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.sizes import ModelSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fp8rl.models.tiny import TinyModel

NORM_EPS = 1e-5


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes as of DeepSeek-V3.2, with transformers' own default of `rms_norm_eps`."""
    return replace(deepseek_v32.sizes(config), norm_eps=config.number("rms_norm_eps", default=NORM_EPS))


def tiny(shape: TinyModel, common: dict[str, Any]) -> PreTrainedModel:
    """Heads whose parts have other widths than DeepSeek-V3.2's; the second layer takes the choice of the first."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    own: dict[str, Any] = {"qk_nope_head_dim": 3 * deepseek_v3.ROPE_DIM, "v_head_dim": 2 * shape.head_dim}
    own |= {"indexer_types": ["full", "shared", *["full"] * (shape.layers - 2)]}
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**deepseek_v32.tiny_config(shape, common), **own))


ARCHITECTURE = replace(
    deepseek_v32.ARCHITECTURE, name="GlmMoeDsaForCausalLM", model_type="glm_moe_dsa", sizes=sizes, tiny=tiny
)
