"""GLM-5: DeepSeek-V3.2 in other sizes, in which several layers may share an indexer's choice."""

from __future__ import annotations

from dataclasses import replace

from fp8rl.models.architectures import deepseek_v32
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.sizes import ModelSizes

NORM_EPS = 1e-5


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes as for DeepSeek-V3.2, with transformers' own default of `rms_norm_eps`."""
    return replace(deepseek_v32.sizes(config), norm_eps=config.number("rms_norm_eps", default=NORM_EPS))


ARCHITECTURE = replace(deepseek_v32.ARCHITECTURE, name="GlmMoeDsaForCausalLM", model_type="glm_moe_dsa", sizes=sizes)
