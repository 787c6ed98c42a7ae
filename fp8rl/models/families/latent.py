"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values come from narrow vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.families import Family, PartNames, Widths, attention_activations, norm_before
from fp8rl.models.families.attention import O_PROJ, o_proj
from fp8rl.models.program import ADD_NORM, LINEAR, NORM, ROPE_FACTOR, THETA, Host, Op, OpForm, OpSite
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The sizes of latent attention, in which `head_dim` is the width of a query, and every head has its own key."""

    q_rank: int
    """Width of the narrow rows of queries; 0: queries come from the hidden states."""
    kv_rank: int
    """Width of the narrow rows of keys and values, which are cached."""
    rope_dim: int
    """Width of the one rotated key that all heads share. It is cached together with the narrow row."""
    value_dim: int
    """Width of a head's value."""
    rotated: bool = True
    """False: no part of queries and keys is rotated."""


def _latent_attention(host: Host, site: OpSite, q: Tensor, kv_row: Tensor) -> Sequence[Tensor]:
    sizes, latent, of_heads = host.sizes, host.sizes.of(Latent), host.product_of_heads(site)
    rank, plain, rotate = latent.kv_rank, sizes.plain_dim, host.rotate_pairs if latent.rotated else (lambda x: x)
    latents = ops.rms_norm(kv_row[..., :rank].contiguous(), host.tensor(site), sizes.norm_eps)
    rows = host.whole(torch.cat((latents, kv_row[..., rank:]), -1))
    rows = torch.cat((rows[..., :rank], rotate(rows[..., None, rank:])[..., 0, :]), -1)
    heads = q.unflatten(-1, (-1, sizes.head_dim))
    inside = of_heads(heads[..., :plain], 0, plain, True)
    queries = torch.cat((inside, rotate(heads[..., plain:])), -1)
    out = host.attend_rows(site, queries, rows, rank)
    return (of_heads(out, plain, latent.value_dim, False).flatten(-2),)


LATENT_DOWN = OpForm(
    name="latent_down",
    shapes="[T, H] -> the narrow rows of queries [T, q rank], and of keys and values [T, kv rank + rope]",
    compute=lambda host, site, x, rows=None: host.products(site, x, rows),
    takes_rows=True,
)
LATENT_ATTENTION = OpForm(
    name="latent_attention",
    shapes="q [T, heads, D] and rows [T, kv rank + rope], neither rotated -> [T, heads * value]: the rows' norm, "
    "`ops.rope_pairs`, `ops.head_linear` into the latents and out of them, and the attention between",
    constants=(THETA, ROPE_FACTOR),
    part="attention",
    across_tokens=True,
    compute=_latent_attention,
)


def latent_attention_ops(sizes: ModelSizes) -> tuple[Op, ...]:
    there = "self_attention."
    first = Op("input_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "input_layernorm")
    if sizes.of(Latent).q_rank:
        up = f"{there}linear_q_up_proj"
        queries: tuple[Op, ...] = (
            Op("qkv_a", LATENT_DOWN, ("x",), ("q_row", "kv_row"), "self_attention"),
            Op("q_a_norm", NORM, ("q_row",), ("q_row",), up),
            Op("q_b", LINEAR, ("q_row",), ("q",), up),
        )
    else:
        queries = (
            Op("q", LINEAR, ("x",), ("q",), f"{there}linear_q_proj"),
            Op("kv_a", LINEAR, ("x",), ("kv_row",), f"{there}linear_kv_down_proj"),
        )
    return first, *queries, Op("attention", LATENT_ATTENTION, ("q", "kv_row"), ("x",), f"{there}core_attention"), O_PROJ


def latent_attention_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    latent, hidden, at = sizes.of(Latent), sizes.hidden_size, PartNames.of(layer, "self_attn.", "self_attention.")
    rows, narrow = sizes.heads * sizes.head_dim, latent.kv_rank + latent.rope_dim
    yield norm_before("input", sizes, layer, "input_layernorm.weight")
    down: dict[str, Any] = {"op": "kv_a"}
    if latent.q_rank:
        down = {"op": "qkv_a", "engine": "fused_qkv_a_proj_with_mqa", "fused": True}
        yield at.product("q_a_proj", (latent.q_rank, hidden), kind="q_a_proj", megatron="linear_q_down_proj", **down)
    else:
        yield at.product("q_proj", (rows, hidden), op="q", kind="q_b_proj", split=0, megatron="linear_q_proj")
    name = "kv_a_proj_with_mqa"
    yield at.product(name, (narrow, hidden), kind="kv_a_proj", megatron="linear_kv_down_proj", **down)
    if latent.q_rank:
        inside_up = "linear_q_up_proj.layer_norm_weight"
        yield at.norm("q_a_layernorm", latent.q_rank, op="q_a_norm", megatron=inside_up)
        up = rows, latent.q_rank
        yield at.product("q_b_proj", up, op="q_b", kind="q_b_proj", split=0, megatron="linear_q_up_proj")
    inside_up = "linear_kv_up_proj.layer_norm_weight"
    yield at.norm("kv_a_layernorm", latent.kv_rank, op="attention", megatron=inside_up)
    both = sizes.heads * (sizes.plain_dim + latent.value_dim), latent.kv_rank
    yield at.product("kv_b_proj", both, op="attention", kind="kv_b_proj", split=0, megatron="linear_kv_up_proj")
    yield o_proj(sizes, at, latent.value_dim)


def _widths(sizes: ModelSizes) -> Widths:
    """Return the widths, without the rows of kv_a_proj_with_mqa, which need not be whole blocks."""
    latent, heads = sizes.of(Latent), sizes.heads
    return Widths(
        {"q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank},
        {
            "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)": heads * sizes.head_dim,
            "num_attention_heads * (qk_nope_head_dim + v_head_dim)": heads * (sizes.plain_dim + latent.value_dim),
            "num_attention_heads * v_head_dim": heads * latent.value_dim,
        },
    )


FAMILY = Family(
    name="latent",
    part="attention",
    kinds=(("q_a_proj", "kv_a_proj"), ("q_b_proj",), ("kv_b_proj",), ("o_proj",)),
    tensors=latent_attention_tensors,
    ops=latent_attention_ops,
    activations=lambda sizes: attention_activations(sizes, sizes.of(Latent).value_dim),
    widths=_widths,
    cached=lambda sizes, ranks: sizes.of(Latent).kv_rank + sizes.of(Latent).rope_dim,
    value=lambda sizes: sizes.of(Latent).kv_rank,
    scored=lambda sizes: sizes.heads * (sizes.head_dim + sizes.of(Latent).value_dim),
    unshared=lambda sizes: {"context": "with latent attention, whose ranks cannot share a row yet"},
    kernels=((9, 0), "its kernels need 170 KiB of shared memory, and these GPUs have 99"),
)
