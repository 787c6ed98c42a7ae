"""GLM-4.7-Flash: DeepSeek-V3 in other sizes, of which the config lists the dense and the sparse layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from fp8rl.models.architectures import deepseek_v3
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow


def sizes(config: ConfigFile) -> ModelSizes:
    """Every size has to be there; the first layer is dense if the file does not say which are."""
    dense = config.leading(
        "mlp_layer_types", "dense", "sparse", default=config.size("first_k_dense_replace", default=1)
    )
    return deepseek_v3.latent_sizes(config, dense, 1.8)


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    return deepseek_v3.tensors(sizes, router=torch.float32)


ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    name="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    aliases=(),
    sizes=sizes,
    tensors=tensors,
)
