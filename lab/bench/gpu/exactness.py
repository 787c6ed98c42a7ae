"""Trainer ops against engine ops on this device, on a stack of MoE layers: d must be 0.

It needs torch and Triton alone. The ops run in the trainer's forms (whole sequences, contiguous keys, norm and product
in one) and in the engine's (prefill, chunks and decode, paged keys, norm with residual), on one set of weights; the
log-probability of every token is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops import ExpertWeights, HeadNorms, NewSlots
from fp8rl.numerics.probe import choose_tiles, row_variant_ops
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from lab.bench.gpu.measure import Layers, Measured, Sizes, Stopwatch, random

SPEC = QuantSpec.preset("fp8_block_pow2")
EPS, THETA, HEAD = 1e-6, 1e6, 128


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    device, shape = watch.device, sizes.exact
    if device.type == "cpu":
        done.leave_out("the start-up probe", "it asks how a machine multiplies; here the kernels are interpreted")
    else:
        variant = row_variant_ops(device)
        done.equal("ops that are not row-invariant here", len(variant))
        for op in variant:
            done.row({"not row-invariant": op})
        for tiles, equal in choose_tiles(device).items():
            done.row({f"tiles {tiles} give the bits of tiles of 128": equal})
    layers = [make_layer(shape, device) for _ in range(shape.layers)]
    table, final = random(shape.vocab, shape.hidden, device=device), make_norm(shape.hidden, device)
    head = random(shape.vocab, shape.hidden, device=device, scale=0.05)
    scale = sizes.length / 16
    lengths = torch.tensor([int(scale * part) for part in (16, 5, 11)], device=device)
    tokens = torch.randint(shape.vocab, (3, int(lengths.max())), device=device)
    trained = _logprobs(_as_trainer(tokens, layers, table, shape), final, head, tokens)
    served, steps = _as_engine(tokens, lengths, layers, table, final, head, shape)
    real = torch.arange(tokens.shape[1] - 1, device=device) < lengths[:, None] - 1
    difference = (trained - served)[real].abs()
    parts = {"tokens": float(real.sum()), "engine steps": float(steps), "mean logprob": trained[real].mean().item()}
    name = f"trainer against engine ops, {shape.layers} layers, prefill, chunks and decode"
    done.equal(name, difference.max().item(), **parts)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; `*_operand` as products take them."""

    norm: Tensor
    qkv: Tensor
    qkv_operand: Any
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    out_operand: Any
    post_norm: Tensor
    router: Tensor
    w13: ExpertWeights
    w2: ExpertWeights


def make_layer(shape: Layers, device: torch.device) -> Layer:
    qkv = random((shape.heads + 2 * shape.kv_heads) * HEAD, shape.hidden, device=device, scale=0.05)
    out = random(shape.hidden, shape.heads * HEAD, device=device, scale=0.05)
    w13 = random(shape.experts, 2 * shape.moe_intermediate, shape.hidden, device=device, scale=0.05)
    w2 = random(shape.experts, shape.hidden, shape.moe_intermediate, device=device, scale=0.05)
    return Layer(
        norm=make_norm(shape.hidden, device),
        qkv=qkv,
        qkv_operand=_operand(qkv),
        q_norm=make_norm(HEAD, device),
        k_norm=make_norm(HEAD, device),
        out=out,
        out_operand=_operand(out),
        post_norm=make_norm(shape.hidden, device),
        router=random(shape.experts, shape.hidden, device=device, scale=0.1),
        w13=ExpertWeights(w13, _operand(w13)),
        w2=ExpertWeights(w2, _operand(w2)),
    )


def make_norm(size: int, device: torch.device) -> Tensor:
    return 1 + random(size, device=device, scale=0.2)


def _operand(weight: Tensor) -> Any:
    return ops.weight_operand(quantize(weight, SPEC.weight))


def _as_trainer(tokens: Tensor, layers: list[Layer], table: Tensor, shape: Layers) -> Tensor:
    """tokens [B, S] -> [B, S, H], as the trainer's modules call the ops."""
    x, (batch, length) = table[tokens], tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, -1)
    for w in layers:
        qkv = ops.norm_fp8_linear(x, w.norm, EPS, w.qkv, w.qkv_operand, SPEC)
        q, k, v = _heads(qkv, w, shape)
        q, k = ops.rope(q, positions, THETA), ops.rope(k, positions, THETA)
        attended = ops.attention(q, k, v, positions, HEAD**-0.5).flatten(2)
        x = x + ops.fp8_linear(attended, w.out, w.out_operand, SPEC)
        normed = ops.rms_norm(x, w.post_norm, EPS)
        x = x + _moe(normed.flatten(0, 1), w, shape).view(x.shape)
    return x


def _as_engine(
    tokens: Tensor, lengths: Tensor, layers: list[Layer], table: Tensor, final: Tensor, head: Tensor, shape: Layers
) -> tuple[Tensor, int]:
    """The log-probabilities [B, S - 1], a step at a time, and how many steps: as an engine calls the ops.

    The first sequence is prefilled whole, the others in chunks, and the last tokens of all are decoded one by one.
    """
    sequences, longest = tokens.shape
    device = tokens.device
    slots = torch.randperm(sequences * longest, device=device).view(sequences, longest).int()
    caches = [torch.full((2, slots.numel(), shape.kv_heads, HEAD), torch.nan, device=device).bfloat16() for _ in layers]
    found = torch.zeros(sequences, longest - 1, device=device)
    chunks, decoded = [longest, 96 if longest > 96 else 2, 33 if longest > 96 else 3], 4
    ends, seen, steps = lengths.tolist(), [0] * sequences, 0
    while any(done < end for done, end in zip(seen, ends, strict=True)):
        left = [end - done for done, end in zip(seen, ends, strict=True)]
        new = [min(chunk, n - decoded) if n > decoded else min(n, 1) for chunk, n in zip(chunks, left, strict=True)]
        where = [(b, range(seen[b], seen[b] + n)) for b, n in enumerate(new)]
        rows = torch.tensor([b for b, span in where for _ in span], device=device)
        positions = torch.tensor([t for _, span in where for t in span], device=device)
        seen = [done + n for done, n in zip(seen, new, strict=True)]
        counts, totals = torch.tensor(new, device=device), torch.tensor(seen, device=device)
        everyone = torch.arange(sequences, device=device)
        pages = Pages(slots, everyone, counts, totals, slots[rows, positions].long())
        x = engine_forward(table[tokens[rows, positions]], positions, layers, caches, pages, final, shape)
        within = positions < longest - 1
        rows, positions = rows[within], positions[within]
        logits = ops.linear(x[within], head)
        found[rows, positions] = ops.token_logprobs(logits, tokens[rows, positions + 1], 1.0)[0]
        steps += 1
    return found, steps


@dataclass(frozen=True)
class Pages:
    """The places of a step's keys: `paged_attention`'s table, requests, new and lengths; slots: of the new tokens."""

    table: Tensor
    requests: Tensor
    new: Tensor | None
    lengths: Tensor
    slots: Tensor


def engine_forward(
    x: Tensor, positions: Tensor, layers: list[Layer], caches: list[Tensor], pages: Pages, final: Tensor, shape: Layers
) -> Tensor:
    """The new tokens' embeddings x [T, H] to what the head takes, as an engine calls the ops; caches [2, slots, ...]
    of the layers get the new keys and values."""
    residual = None
    for w, (keys, values) in zip(layers, caches, strict=True):
        x, residual, rows = ops.norm_rows(x, residual, w.norm, EPS, SPEC.activation)
        qkv = ops.rows_linear(rows, w.qkv_operand, x.dtype).unflatten(-1, (-1, HEAD))
        q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], -2)
        norms, cache = HeadNorms(w.q_norm, w.k_norm, EPS), NewSlots(keys, values, pages.slots, v)
        q, k = ops.rope_heads(q, k, positions, THETA, norms=norms, cache=cache)
        attended = ops.paged_attention(
            q, keys, values, pages.table, pages.requests, pages.new, pages.lengths, HEAD**-0.5
        )
        x = ops.fp8_linear(attended.flatten(1), w.out, w.out_operand, SPEC, "bf16")
        x, residual, rows = ops.norm_rows(x, residual, w.post_norm, EPS, SPEC.activation)
        probs, chosen = ops.route(ops.linear(x, w.router), shape.top_k, True, ids=torch.int32)
        x = ops.routed_experts(x, probs, chosen, w.w13, w.w2, SPEC, "bf16", rows)
    return ops.norm_rows(x, residual, final, EPS, SPEC.activation)[0]


def _logprobs(x: Tensor, final: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    logits = ops.linear(ops.rms_norm(x, final, EPS), head)
    return ops.token_logprobs(logits[:, :-1], tokens[:, 1:], 1.0)[0]


def _heads(qkv: Tensor, w: Layer, shape: Layers) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unflatten(-1, (-1, HEAD)).split([shape.heads, shape.kv_heads, shape.kv_heads], -2)
    return ops.rms_norm(q, w.q_norm, EPS), ops.rms_norm(k, w.k_norm, EPS), v


def _moe(x: Tensor, w: Layer, shape: Layers) -> Tensor:
    probs, chosen = ops.route(ops.linear(x, w.router), shape.top_k, True)
    order, counts = ops.group_by_expert(chosen, shape.experts)
    outputs = ops.experts(x[order // shape.top_k], counts, w.w13, w.w2, SPEC)
    return ops.combine(outputs, probs, order, x.dtype)
