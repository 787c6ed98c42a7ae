"""Sizes, formula, tensors and ops of the made-up architecture."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from fp8rl.models.architectures import qwen3_moe
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import Family, PartNames, attention, mlp
from fp8rl.models.program import LINEAR, NORM, Host, Op, OpForm, OpSite
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.ops.experts import sigmoid

EXPERTS = "specialists"
PROJECTED = "projected_kv_heads"
"""Heads of keys and values that have weights; `num_key_value_heads` are cached, as many as there are of queries."""


def sizes(config: ConfigFile) -> ModelSizes:
    return replace(qwen3_moe.sizes(config), kv_heads=config.size(PROJECTED))


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """Attention x [..., heads * D], each head times the sigmoid of its gate [..., heads]: in FP32, rounded once."""
    heads = x.unflatten(-1, (gates.shape[-1], -1)).float()
    return (heads * sigmoid(gates.float()).unsqueeze(-1)).to(x.dtype).flatten(-2)


def gated(host: Host, site: OpSite, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor]:
    keys, values = (x.repeat_interleave(q.shape[-2] // x.shape[-2], -2) for x in (k, v))
    return (gate_heads(host.attend(site, q, keys, values), gates),)


GATED = OpForm(
    name="gated_attention",
    shapes="q, k, v, gates [T, heads] -> [T, heads * D]; each query has a key of its own in the cache",
    definition=gate_heads, compute=gated, part="attention",
)  # fmt: skip


def tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    at = PartNames.of(layer, "self_attn.", "self_attention.")
    for row in attention.attention_tensors(sizes, layer):
        moved = replace(row.megatron, parameter=f"{at.there}linear_proj.proj.weight")
        yield replace(row, megatron=moved) if row.op == "o_proj" else row
    yield at.product("head_gates", (sizes.heads, sizes.hidden_size), op="gates", kind=None, megatron="gates")
    yield at.norm("out_norm", sizes.hidden_size, op="out_norm", megatron="linear_proj.norm.weight")


def ops(sizes: ModelSizes) -> tuple[Op, ...]:
    input_norm, qkv, *norms_and_rope, attended, o_proj = attention.attention_ops(sizes)
    assert attended.form is attention.ATTENTION
    return (
        input_norm, qkv, Op("gates", LINEAR, ("x",), ("gates",), "self_attention.gates"),
        *norms_and_rope, replace(attended, form=GATED, reads=("q", "k", "v", "gates")),
        replace(o_proj, megatron="self_attention.linear_proj.proj"),
        Op("out_norm", NORM, ("x",), ("x",), "self_attention.linear_proj.norm"),
    )  # fmt: skip


FAMILY = Family(
    name="gated", part="attention", kinds=attention.FAMILY.kinds, tensors=tensors, ops=ops,
    activations=attention.FAMILY.activations, widths=attention.FAMILY.widths,
    cached=lambda sizes, ranks: 2 * sizes.head_dim * sizes.heads // ranks, scored=attention.FAMILY.scored,
)  # fmt: skip
ARCHITECTURE = replace(
    qwen3_moe.ARCHITECTURE, name="MadeUpForCausalLM", sizes=sizes,
    families=(FAMILY, replace(mlp.MOE, tensors=partial(mlp.moe_tensors, experts=EXPERTS))),
)  # fmt: skip
