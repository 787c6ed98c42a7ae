"""GLM-4.7-Flash: DeepSeek-V3 in other sizes. Its config lists which layers are dense and which are sparse."""

from __future__ import annotations

from dataclasses import replace

from fp8rl.models.architectures import deepseek_v3
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import latent, mlp
from fp8rl.models.sizes import ModelSizes


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. config.json must have every size. By default only the first layer is dense. `rms_norm_eps` has
    transformers' own default."""
    dense = config.dense_layers(config.size("first_k_dense_replace", default=1))
    return deepseek_v3.latent_sizes(config, dense, 1.8, norm_eps=1e-5)


ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    name="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    aliases=(),
    sizes=sizes,
    families=(latent.FAMILY, mlp.DENSE, mlp.MOE),
)
