"""Mixtral: routed experts in every layer, plain attention without biases or norms, and names of its own for the MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8rl.models import parts
from fp8rl.models.architectures import qwen3_moe
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.models.trace import Forward

PLACE = "block_sparse_moe."
EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
THETA = 1e6
VARIANTS = {"hidden_act": "silu", "sliding_window": None, "tie_word_embeddings": False}
"""The only values of these keys that SGLang's model and the shared ops define."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Absent keys have the defaults of transformers' MixtralConfig, but for the size of a model."""
    config.refuse_variants(VARIANTS)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", default=8)
    width = max(1, hidden // heads)
    head_dim = config.size("head_dim", default=width, if_null=width)
    theta = config.rope_theta(THETA)
    for name, found, fixed in (("head_dim", head_dim, hidden / heads), ("rope_theta", theta, int(theta))):
        if found != fixed:
            remedy = "Use another model: SGLang computes Mixtral with this value only."
            raise config.refusal(name, found, f"{fixed:g}", remedy)
    attention = parts.family_sizes(config, heads, kv_heads, head_dim) | {
        "norm_eps": config.number("rms_norm_eps", default=1e-5),
        "rope_theta": theta,
    }
    return parts.checked(
        config,
        ModelSizes(
            **attention,
            experts=config.one_of("num_local_experts", "num_experts"),
            top_k=config.size("num_experts_per_tok", default=2),
            expert_size=config.size("intermediate_size"),
            renormalize=True,
            head_norms=None,
        ),
    )


def tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    for row in qwen3_moe.tensors(sizes):
        yield _renamed(row) if row.op in ("router", "experts") else row


def _renamed(row: TensorRow) -> TensorRow:
    """The row of router or expert, by the names that Mixtral has in checkpoints and engine."""
    *before, weight, suffix = row.name.replace("mlp.", PLACE).split(".")
    engine = replace(row.engine, parameter=row.engine.parameter.replace("mlp.", PLACE))
    return replace(row, name=".".join((*before, EXPERT.get(weight, weight), suffix)), engine=engine)


def forward(sizes: ModelSizes) -> Forward:
    layer = parts.attention_ops(sizes) + tuple(
        replace(op, engine=op.engine.replace("mlp.", PLACE)) if op.engine else op for op in parts.MOE_OPS
    )
    return Forward(parts.FIRST_OPS, (layer,) * sizes.layers, parts.LAST_OPS)


ARCHITECTURE = replace(
    qwen3_moe.ARCHITECTURE,
    name="MixtralForCausalLM",
    model_type="mixtral",
    sizes=sizes,
    tensors=tensors,
    forward=forward,
    engine_extras=parts.CACHE_SCALES,
)
