"""DeepSeek-V3.2: DeepSeek-V3 with an indexer that chooses `index_topk` keys for each query (sparse attention).

In a row of at most `index_topk` tokens the indexer chooses every key, so attention is the same as in DeepSeek-V3.
Longer rows are refused. The indexer's weights are not read, trained or served; a written model has them unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from fp8rl.models.architectures import deepseek_v3
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.sizes import ModelSizes

LIMIT = "index_topk (in a longer row the indexer leaves keys out, which is not supported)"


def sizes(config: ConfigFile, norm_eps: float = 1e-6) -> ModelSizes:
    """Read the sizes. config.json must also have the keys that SGLang's model reads and transformers' config lacks.

    Without `index_topk` or the keys of the dense layers, transformers' defaults are used. norm_eps: its default.
    """
    if (every := config.size("moe_layer_freq")) != 1:
        raise config.refusal("moe_layer_freq", every, "1: experts in all layers but the first")
    for name in ("scoring_func", "topk_method"):
        config.expect(name, str(deepseek_v3.VARIANTS[name]), "as the engine's router has it")
    dense = config.dense_layers(config.size("first_k_dense_replace", default=3))
    found = deepseek_v3.latent_sizes(config, dense, 2.5, indexer=True, norm_eps=norm_eps)
    chosen = config.size("index_topk", default=2048)
    if chosen < found.max_positions:
        found = replace(found, max_positions=chosen, limit=LIMIT)
    return replace(found, kept_in_layers=(".self_attn.indexer.",))


ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE, name="DeepseekV32ForCausalLM", model_type="deepseek_v32", aliases=(), sizes=sizes
)
