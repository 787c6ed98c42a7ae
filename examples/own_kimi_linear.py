"""An architecture of one's own with a family of ops of its own: Kimi-Linear (arXiv 2510.26692).

    fp8rl train SPEC model.path=DIR model.architecture=examples/own_kimi_linear.py

Three of four layers have Kimi Delta Attention: the gated delta rule with a decay for each channel of a key. It has a
product into queries, keys and values; a short convolution over them; the decays and the gates of the output, each from
a narrow row; beta; the rule; a norm of each head, times the sigmoid of the gates; and the projection out. `A_log` and
`dt_bias` are in FP32. The fourth layer has latent attention without rotation. Exact mode, one rank a side; it has run
on a CPU with random weights in rows of up to 2,048 tokens.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fp8rl.models import Architecture
from fp8rl.models.architectures import mixtral
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.families import Activations, Family, PartNames, Widths, gated_delta, latent, mlp, norm_before
from fp8rl.models.families.attention import o_proj
from fp8rl.models.families.gated_delta import CONV_BYTES, IN_FP32, STATE_BYTES
from fp8rl.models.program import ADD_NORM, EPS, LINEAR, Host, Op, OpForm, OpSite
from fp8rl.models.sizes import ModelSizes, sigmoid_router
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops


@dataclass(frozen=True, kw_only=True)
class Kda:
    """The sizes of Kimi Delta Attention. Queries, keys and values have the same heads."""

    layers: Collection[int]
    """The layers with it, counted from 0."""
    heads: int
    head_dim: int
    taps: int
    """Number of tokens that the convolution reads, with the token itself."""

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def _of_head(sizes: ModelSizes) -> tuple[int, int, int]:
    return (sizes.of(Kda).head_dim,) * 3


def _in_proj(host: Host, site: OpSite, x: Tensor, rows: Any = None) -> Sequence[Tensor]:
    own = host.sizes.of(Kda)
    return (host.joined([each.unflatten(-1, (-1, own.head_dim)) for each in host.products(site, x, rows)]),)


def _delta(host: Host, site: OpSite, qkv: Tensor, b: Tensor, a: Tensor) -> Sequence[Tensor]:
    """`ops.delta_gates` takes a and b of one shape: each head's b stands for all of its channels."""
    of_head, b, a = _of_head(host.sizes), host.in_rows(b), host.in_rows(a)
    width = of_head[0]
    b, a_log = (x.repeat_interleave(width, -1) for x in (b, host.tensor(site, "A_log").flatten()))
    g, beta = (x.unflatten(-1, (-1, width)) for x in ops.delta_gates(a, b, a_log, host.tensor(site, "dt_bias")))
    return (host.recur(site, *host.apart(qkv, of_head), g, beta[..., 0]).flatten(-2),)


def _gated_norm(host: Host, site: OpSite, x: Tensor, gate: Tensor) -> Sequence[Tensor]:
    weight, eps = host.tensor(site), host.sizes.norm_eps

    def normed(heads: Tensor, gates: Tensor) -> Tensor:
        return ops.sigmoid_gate(ops.rms_norm(heads.unflatten(-1, (-1, len(weight))), weight, eps).flatten(-2), gates)

    return (host.by_rows(normed, x, gate),)


IN_PROJ = OpForm(
    name="kda_in_proj",
    shapes="[T, H] -> queries, keys and values of all heads [T, C]",
    channels=_of_head,
    compute=_in_proj,
    takes_rows=True,
)
CONV = replace(gated_delta.CONV, name="kda_conv", channels=_of_head)
DELTA = OpForm(
    name="kda",
    shapes="queries, keys and values [T, C], b [T, heads], a [T, heads * D] -> [T, heads * D]: `ops.delta_gates`, and "
    "the rule with a decay for each channel of a key",
    across_tokens=True,
    compute=_delta,
    formats=gated_delta.DELTA.formats,
)
GATED_NORM = OpForm(
    name="kda_norm",
    shapes="[T, heads * D], gates -> the same, normed over each head, times the sigmoid of the gates",
    constants=(EPS,),
    part="norm",
    compute=_gated_norm,
)
INSIDE = "self_attention."
OPS = (
    Op("input_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "input_layernorm"),
    Op("in_proj", IN_PROJ, ("x",), ("qkv",), f"{INSIDE}in_proj"),
    *(Op(f"{name}_proj", LINEAR, (reads,), (writes,), f"{INSIDE}{name}_proj") for name, reads, writes in (
        ("b", "x", "b"), ("f_a", "x", "a"), ("f_b", "a", "a"), ("g_a", "x", "gate"), ("g_b", "gate", "gate"))),
    Op("conv", CONV, ("qkv",), ("qkv",), f"{INSIDE}conv1d"),
    Op("delta", DELTA, ("qkv", "b", "a"), ("x",), f"{INSIDE}core_attention"),
    Op("out_norm", GATED_NORM, ("x", "gate"), ("x",), f"{INSIDE}o_norm"),
    Op("o_proj", LINEAR, ("x",), ("x",), f"{INSIDE}linear_proj"),
)  # fmt: skip


def kda_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    own, hidden, at = sizes.of(Kda), sizes.hidden_size, PartNames.of(layer, "self_attn.", INSIDE)
    width, narrow, by_head = own.width, own.head_dim, {"layout": "heads", "groups": own.heads}
    yield norm_before("input", sizes, layer, "input_layernorm.weight")
    for name in ("q_proj", "k_proj", "v_proj"):
        held: dict[str, Any] = {"engine": "qkv_proj", "split": 0, "megatron": "in_proj", **by_head}
        yield at.product(name, (width, hidden), op="in_proj", kind=name, **held)
    for name, shape in (
        ("b", (own.heads, hidden)), ("f_a", (narrow, hidden)), ("f_b", (width, narrow)), ("g_a", (narrow, hidden)),
        ("g_b", (width, narrow)),
    ):  # fmt: skip
        split = None if shape[0] == narrow else 0
        yield at.product(f"{name}_proj", shape, op=f"{name}_proj", kind=None, split=split, megatron=f"{name}_proj")
    for name in ("q", "k", "v"):
        held = {"op": "conv", "engine": "qkv_conv1d.weight", "split": 0, "megatron": "conv1d.weight", **by_head}
        yield at.tensor(f"{name}_conv1d.weight", (width, 1, own.taps), **held)
    for name, shape in (("A_log", (1, 1, own.heads, 1)), ("dt_bias", (width,))):
        yield at.tensor(name, shape, op="delta", megatron=name, **IN_FP32)
    yield at.norm("o_norm", own.head_dim, op="out_norm", megatron="o_norm.weight")
    yield o_proj(sizes, at, own.width // sizes.heads)


def _activations(sizes: ModelSizes) -> Activations:
    """Return the activations as of the gated delta rule, with decays, beta and gates of all channels in FP32."""
    width, core = sizes.of(Kda).width, 26 * sizes.of(Kda).width
    return Activations(bf16=8 * sizes.hidden_size + 14 * width + core, fp8=1.03 * width - 0.97 * sizes.hidden_size)


def _held(sizes: ModelSizes, ranks: int) -> int:
    own = sizes.of(Kda)
    return own.width * (STATE_BYTES * own.head_dim + CONV_BYTES * (own.taps - 1) * 3) // ranks


FAMILY = Family(
    name="kda",
    part="attention",
    kinds=(("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    tensors=kda_tensors,
    ops=lambda sizes: OPS,
    activations=_activations,
    widths=lambda sizes: Widths({"linear_attn_config.head_dim": sizes.of(Kda).head_dim}),
    within=lambda sizes, layer: layer in sizes.of(Kda).layers,
    held=_held,
    recurrent=lambda sizes: 7 * sizes.of(Kda).width * sizes.of(Kda).head_dim + 6 * sizes.of(Kda).taps,
    unshared=lambda sizes: {
        "context": "with linear attention, whose ranks cannot share a row yet",
        "engine": "whose A_log is one row, which ranks do not share yet",
    },
)


# The architecture.

VARIANTS = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "routed_expert_hidden_size": None,
    "attn_res_block_size": None,
    "num_nextn_predict_layers": 0,
}
"""The only values of these keys that the shared ops define."""


def sizes(config: ConfigFile) -> ModelSizes:
    """Read the sizes. config.json must have every size."""
    config.refuse_variants(VARIANTS)
    linear, layers = config.inner("linear_attn_config", ()), config.size("num_hidden_layers")
    heads, rope = config.size("num_attention_heads"), config.size("qk_rope_head_dim")
    experts, width, top_k = map(config.size, ("num_experts", "moe_intermediate_size", "num_experts_per_token"))
    groups, kept = config.size("num_expert_group", default=1), config.size("topk_group", default=1)
    kinds = {name: linear.values.get(name) or [] for name in ("kda_layers", "full_attn_layers")}
    if sorted(layer for each in kinds.values() for layer in each) != list(range(1, layers + 1)):
        raise config.refusal("linear_attn_config", kinds, f"each layer from 1 to {layers} in one of both lists")
    router = sigmoid_router(config, experts, groups, kept, top_k, 1.0)
    return ModelSizes(
        layers=layers,
        hidden_size=config.size("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.size("qk_nope_head_dim") + rope,
        rotary_dim=rope,
        vocab_size=config.size("vocab_size"),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope_theta=config.rope_theta(),
        max_positions=config.one_of("max_position_embeddings", "model_max_length"),
        tied=config.flag("tie_word_embeddings", default=False),
        ffn_size=config.size("intermediate_size"),
        experts=experts,
        top_k=top_k,
        expert_size=width,
        dense_layers=config.count("first_k_dense_replace"),
        shared_size=config.count("num_shared_experts") * width,
        renormalize=config.flag("moe_renormalize", default=True),
        sigmoid_router=router,
        head_norms=None,
        own=(
            latent.Latent(
                q_rank=config.count("q_lora_rank"),
                kv_rank=config.size("kv_lora_rank"),
                rope_dim=rope,
                value_dim=config.size("v_head_dim"),
                rotated=False,
            ),
            Kda(
                layers=tuple(layer - 1 for layer in kinds["kda_layers"]),
                heads=linear.size("num_heads"),
                head_dim=linear.size("head_dim"),
                taps=linear.size("short_conv_kernel_size"),
            ),
        ),
    )


LATENT = replace(latent.FAMILY, within=lambda sizes, layer: layer not in sizes.of(Kda).layers)
ARCHITECTURE = Architecture(
    name="KimiLinearForCausalLM",
    model_type="kimi_linear",
    sizes=sizes,
    families=(FAMILY, LATENT, mlp.DENSE, replace(mlp.MOE, tensors=mixtral.block_sparse_tensors)),
)
