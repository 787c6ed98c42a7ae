"""An architecture of one's own: a lab's model that is Llama under another name, `OurLlamaForCausalLM`.

    fp8rl train SPEC model.path=DIR model.architecture=examples/own_llama.py

It is Qwen3 without norms of the heads. What the shared ops do not define is refused: biases, a scaled rotation.
"""

from dataclasses import replace

from fp8rl.models import ModelSizes, family_sizes
from fp8rl.models.architectures import qwen3
from fp8rl.models.config_file import ConfigFile

VARIANTS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' LlamaConfig."""
    config.refuse_variants(VARIANTS)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    head_dim = config.size("head_dim", default=hidden // heads, if_null=hidden // heads)
    kv_heads = config.size("num_key_value_heads", default=heads, if_null=heads)
    own = family_sizes(config, heads, kv_heads, head_dim)
    return ModelSizes(**own, ffn_size=config.size("intermediate_size"), head_norms=None)


ARCHITECTURE = replace(qwen3.ARCHITECTURE, name="OurLlamaForCausalLM", model_type="llama", sizes=sizes)
