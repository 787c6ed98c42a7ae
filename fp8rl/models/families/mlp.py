"""MLPs with SwiGLU: a dense MLP in each layer, or routed experts, with or without shared experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.families import Activations, Family, PartNames, Widths, mlp_activations, norm_before
from fp8rl.models.program import ADD_NORM, LINEAR, Host, Op, OpForm, OpSite
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops


def _sigmoid_topk(host: Host, site: OpSite, logits: Tensor) -> Sequence[Tensor]:
    how, bias = host.sizes.sigmoid_router, host.tensor(site)
    assert how is not None
    arguments = host.sizes.top_k, how.groups, how.kept_groups, host.sizes.renormalize, how.factor
    return host.choose(site, partial(ops.route_sigmoid, logits.flatten(0, -2), bias, *arguments))


SWIGLU = OpForm(
    name="swiglu",
    shapes="gate and up [T, 2F], or one each [T, F] -> [T, F]",
    compute=lambda host, site, gate_up: (ops.swiglu(gate_up),),
)
ROUTER = OpForm(
    name="router",
    shapes="[T, H] -> logits FP32 [T, E], not rounded",
    # Some engines hold the weight in FP32, though the checkpoint has it in BF16.
    compute=lambda host, site, x: (ops.linear_partial(x, host.tensor(site).to(x.dtype)),),
)
TOPK = OpForm(
    name="topk",
    shapes="logits [T, E] -> probabilities FP32 [T, k] of the experts that are chosen; chosen int [T, k], ascending",
    part="router",
    compute=lambda host, site, logits: host.choose(
        site, partial(ops.route, logits.flatten(0, -2), host.sizes.top_k, host.sizes.renormalize)
    ),
)
SIGMOID_TOPK = replace(
    TOPK,
    name="sigmoid_topk",
    shapes="as topk, for experts that are chosen by sigmoid + bias",
    compute=_sigmoid_topk,
    formats={
        **dict.fromkeys(("router.logits", "router.probabilities"), "fp32"),
        "router.operands": "bf16|fp32",  # exact mode multiplies BF16 operands as BF16
    },
)
EXPERTS = OpForm(
    name="experts",
    shapes="x [T, H], probabilities, chosen -> [T, H]; recorded too: `each` [T, k, H], one expert's share of it",
    part="experts",
    compute=lambda host, site, x, probs, chosen, rows=None: (host.experts(site, x, probs, chosen, rows),),
    takes_rows=True,
)
EXPERTS_AND_SHARED = replace(
    EXPERTS,
    name="experts_and_shared",
    shapes="x [T, H], probabilities, chosen, output of shared experts [T, H] -> the sum [T, H]; `each` as of experts",
    compute=lambda host, site, x, probs, chosen, shared, rows=None: (
        host.experts(site, x, probs, chosen, rows) + shared,
    ),
)

SHARED_GATE = OpForm(
    name="shared_gate",
    shapes="x [T, H], output of shared experts [T, H] -> the output times the sigmoid of the token's gate",
    part="gate",
    compute=lambda host, site, x, shared: (ops.token_gate(shared, x, host.tensor(site)),),
)

_READS, _SHARED = ("x", "residual"), "shared_experts"
DENSE_OPS = (
    Op("post_norm", ADD_NORM, _READS, _READS, "mlp.linear_fc1"),
    Op("gate_up", LINEAR, ("x",), ("x",), "mlp.linear_fc1"),
    Op("swiglu", SWIGLU, ("x",), ("x",), "mlp.linear_fc2"),
    Op("down", LINEAR, ("x",), ("x",), "mlp.linear_fc2"),
)


def moe_ops(sizes: ModelSizes) -> tuple[Op, ...]:
    """Return the ops: norm, shared experts, router (softmax or sigmoid), and routed experts plus the shared output."""
    logits, choice = (LINEAR, TOPK) if sizes.sigmoid_router is None else (ROUTER, SIGMOID_TOPK)
    reads = ("x", "probs", "chosen", *(("shared",) if sizes.shared_size else ()))
    return (
        Op("post_norm", ADD_NORM, _READS, _READS, "pre_mlp_layernorm"),
        *(_shared_ops(sizes.shared_gate) if sizes.shared_size else ()),
        Op("router", logits, ("x",), ("logits",), "mlp.router"),
        Op("topk", choice, ("logits",), ("probs", "chosen"), "mlp.router"),
        Op("experts", EXPERTS_AND_SHARED if sizes.shared_size else EXPERTS, reads, ("x",), "mlp"),
    )


def _shared_ops(gated: bool) -> Iterator[Op]:
    there = f"mlp.{_SHARED}"
    yield Op("shared_gate_up", LINEAR, ("x",), ("shared",), f"{there}.linear_fc1")
    yield Op("shared_swiglu", SWIGLU, ("shared",), ("shared",), f"{there}.linear_fc2")
    yield Op("shared_down", LINEAR, ("shared",), ("shared",), f"{there}.linear_fc2")
    if gated:
        yield Op("shared_gate", SHARED_GATE, ("x", "shared"), ("shared",), there)


def dense_tensors(sizes: ModelSizes, layer: int) -> Iterator[TensorRow]:
    yield norm_before("post", sizes, layer, "mlp.linear_fc1.layer_norm_weight")
    yield from _mlp(PartNames.of(layer, "mlp.", "mlp."), sizes.hidden_size, sizes.ffn_size)


def _mlp(at: PartNames, hidden: int, width: int, ops: str = "") -> Iterator[TensorRow]:
    """Yield the rows of one MLP. ops: the beginning of the names of its ops."""
    both: dict[str, Any] = {"op": f"{ops}gate_up", "engine": "gate_up_proj", "split": 0, "megatron": "linear_fc1"}
    for name in ("gate_proj", "up_proj"):
        yield at.product(name, (width, hidden), kind=name, **both)
    yield at.product("down_proj", (hidden, width), op=f"{ops}down", kind="down_proj", split=1, megatron="linear_fc2")


def moe_tensors(
    sizes: ModelSizes, layer: int, experts: str = "experts", router: torch.dtype | None = None, shared: str = _SHARED
) -> Iterator[TensorRow]:
    """Yield the rows of a layer's router, experts and shared experts. experts, shared: their names in the checkpoint.
    router: the dtype in which the engine holds the router's weight; None: FP32 if it takes sigmoids, else BF16."""
    hidden, width, at = sizes.hidden_size, sizes.expert_size, PartNames.of(layer, "mlp.", "mlp.")
    served = router or (torch.float32 if sizes.sigmoid_router else torch.bfloat16)
    yield norm_before("post", sizes, layer, "pre_mlp_layernorm.weight")
    yield at.product("gate", (sizes.experts, hidden), op="router", megatron="router", served=served)
    if sizes.sigmoid_router:
        bias: dict[str, Any] = {"megatron": "router.expert_bias", "buffer": True, "served": torch.float32}
        yield at.tensor("gate.e_score_correction_bias", (sizes.experts,), op="topk", **bias)
    for expert in range(sizes.experts):
        for name, shape, parameter, fc in (
            ("gate_proj", (width, hidden), "w13_weight", "linear_fc1"),
            ("up_proj", (width, hidden), "w13_weight", "linear_fc1"),
            ("down_proj", (hidden, width), "w2_weight", "linear_fc2"),
        ):
            yield at.tensor(
                f"{experts}.{expert}.{name}.weight",
                shape,
                op="experts",
                expert=expert,
                kind=f"experts.{name}",
                product=True,
                engine=f"experts.{parameter}",
                index=expert,
                megatron=f"experts.{fc}.weight{expert}",
            )
    if sizes.shared_size:
        of_shared = PartNames.of(layer, f"mlp.{shared}.", f"mlp.{_SHARED}.")
        yield from _mlp(of_shared, hidden, sizes.shared_size, "shared_")
    if sizes.shared_gate:
        name = f"{shared}_gate.weight"
        yield at.tensor(name, (1, hidden), op="shared_gate", product=True, megatron=f"{_SHARED}.gate_weight")


def _of_experts(sizes: ModelSizes) -> Activations:
    shared = ((1, sizes.shared_size),) if sizes.shared_size else ()
    return mlp_activations(sizes, (sizes.top_k, sizes.expert_size), *shared, experts=sizes.experts)


DENSE = Family(
    name="mlp",
    part="mlp",
    kinds=(("gate_proj", "up_proj"), ("down_proj",)),
    tensors=dense_tensors,
    ops=lambda sizes: DENSE_OPS,
    activations=lambda sizes: mlp_activations(sizes, (1, sizes.ffn_size)),
    widths=lambda sizes: Widths(split={"intermediate_size": sizes.ffn_size}),
    within=lambda sizes, layer: not sizes.has_experts(layer),
)
MOE = Family(
    name="experts",
    part="mlp",
    kinds=(("experts.gate_proj", "experts.up_proj"), ("experts.down_proj",)),
    tensors=moe_tensors,
    ops=moe_ops,
    activations=_of_experts,
    widths=lambda sizes: Widths(
        {"moe_intermediate_size": sizes.expert_size}, {"moe_intermediate_size * n_shared_experts": sizes.shared_size}
    ),
    within=lambda sizes, layer: sizes.has_experts(layer),
)
