"""GLM-5: DeepSeek-V3.2 in other sizes, in which several layers may share an indexer's choice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fp8rl.models.architectures import deepseek_v32

ARCHITECTURE = replace(
    deepseek_v32.ARCHITECTURE,
    name="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    sizes=partial(deepseek_v32.sizes, norm_eps=1e-5),
)
