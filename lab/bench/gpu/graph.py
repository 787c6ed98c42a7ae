"""A decode step in a CUDA graph against the same step without one: what an engine serves against what the ops define.

The graphs share their memory, the largest captured first, as an engine's do. Between capture and replay the memory that
was freed is overwritten: a graph that reads what nobody holds for it any more has other bits then. So has one that kept
a copy of the weights, once the weights are changed in place, as a sync does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops import ExpertWeights
from lab.bench.gpu.exactness import HEAD, Layer, Pages, engine_forward, make_layer, make_norm
from lab.bench.gpu.measure import Layers, Measured, Sizes, Stopwatch, random

OF_LAYER, BESIDE_LAYERS = 14, 4
"""Kernels of the step in a layer, and beside the layers: row numbers, embedding, last norm and head. Counted on the
meta device for up to 1,024 keys, of which no parts are merged."""


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    device, shape = watch.device, sizes.stack
    if device.type == "cpu":
        done.leave_out("CUDA graphs", "a CPU has none; the step is called twice in their place")
    model = _Model.random(shape, device)
    steps = [_Step.random(rows, sizes.context, model) for rows in sorted(sizes.decoded, reverse=True)]
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    replays = [_recorded(step.logits, pool) for step in steps]
    _overwrite_freed_memory(device)
    different = {"captured": 0, "changed in place": 0}
    plain: list[Tensor] = []
    for weights in different:
        if weights == "changed in place":
            model.change()
        former, plain = plain, []
        for step, replay in zip(steps, replays, strict=True):
            if weights == "captured":
                step.refill()  # a graph that kept its inputs is found out, too
            found = replay().clone()
            plain.append(step.logits())
            wrong = int((_bits(found) != _bits(plain[-1])).sum())
            different[weights] += wrong
            seconds = watch.side_by_side({"graph (s)": replay, "eager (s)": step.logits}, 1, with_host=True)
            what = {"rows": len(step.tokens), "weights": weights, "logits": found.numel(), "logits that differ": wrong}
            done.row({**what, "kernels": OF_LAYER * shape.layers + BESIDE_LAYERS, "GB": step.gigabytes()}, seconds)
    moved = sum(int((_bits(a) != _bits(b)).sum()) for a, b in zip(former, plain, strict=True))
    parts = {"batches": len(steps), "logits": sum(logits.numel() for logits in plain)}
    done.equal("logits of a decode step, replayed against eager", different["captured"], **parts)
    parts["logits that the change moved"] = moved
    done.equal("the same after weights were changed in place", different["changed in place"], **parts)


@dataclasses.dataclass(frozen=True)
class _Model:
    shape: Layers
    layers: list[Layer]
    table: Tensor
    final: Tensor
    head: Tensor

    @classmethod
    def random(cls, shape: Layers, device: torch.device) -> _Model:
        layers = [make_layer(shape, device) for _ in range(shape.layers)]
        table = random(shape.vocab, shape.hidden, device=device)
        head = random(shape.vocab, shape.hidden, device=device, scale=0.05)
        return cls(shape, layers, table, make_norm(shape.hidden, device), head)

    def change(self) -> None:
        """Other numbers in every weight of the layers, where they are."""
        for layer in self.layers:
            for old, new in zip(_tensors(layer), _tensors(make_layer(self.shape, self.head.device)), strict=True):
                old.copy_(new)


def _tensors(holder: Any) -> list[Tensor]:
    """The tensors that a frozen dataclass holds, also inside others; of FP8 codes, their bytes."""
    if isinstance(holder, Tensor):
        return [holder.view(torch.uint8) if holder.dtype.itemsize == 1 else holder]
    if not dataclasses.is_dataclass(holder):
        return []
    skipped = {"weights"} if isinstance(holder, ExpertWeights) else set()  # no product reads them
    fields = (field.name for field in dataclasses.fields(holder) if field.name not in skipped)
    return [tensor for name in fields for tensor in _tensors(getattr(holder, name))]


@dataclasses.dataclass(frozen=True)
class _Step:
    """One decode step of some sequences, with inputs that stay where they are.

    tokens, positions, lengths, slots: int64 [rows]; caches: of each layer, [2, slots, kv heads, D].
    """

    model: _Model
    context: int
    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    slots: Tensor
    table: Tensor
    caches: list[Tensor]

    @classmethod
    def random(cls, rows: int, context: int, model: _Model) -> _Step:
        device, shape = model.head.device, model.shape
        table = torch.randperm(rows * context, device=device).view(rows, context).int()
        caches = [random(2, rows * context, shape.kv_heads, HEAD, device=device) for _ in model.layers]
        inputs = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4))
        step = cls(model, context, *inputs, table, caches)
        step.refill()
        return step

    def refill(self) -> None:
        self.tokens.random_(self.model.shape.vocab)
        self.positions.random_(self.context)
        self.lengths.copy_(self.positions + 1)
        self.slots.copy_(self.table.gather(1, self.positions[:, None]).squeeze(1))

    def gigabytes(self) -> float:
        """What the step moves of weights, mostly in FP8, and of the cache; of experts as many as so many rows are
        expected to choose."""
        shape, rows = self.model.shape, len(self.tokens)
        chosen = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** rows)
        attention = 2 * (shape.heads + shape.kv_heads) * HEAD * shape.hidden
        experts = 3 * chosen * shape.moe_intermediate * shape.hidden
        router, head = 2 * shape.experts * shape.hidden, 2 * shape.vocab * shape.hidden
        cache = rows * (self.context + 1) / 2 * 2 * shape.kv_heads * HEAD * 2
        return (shape.layers * (attention + experts + router + cache) + head) / 1e9

    def logits(self) -> Tensor:
        model, rows = self.model, torch.arange(len(self.tokens), device=self.tokens.device)
        pages = Pages(self.table, rows, None, self.lengths, self.slots)
        embedded = model.table[self.tokens]
        x = engine_forward(embedded, self.positions, model.layers, self.caches, pages, model.final, model.shape)
        return ops.linear(x, model.head)


def _recorded(call: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
    """Record the call as a CUDA graph in this pool of memory; without one, return the call itself."""
    if pool is None:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # kernels are compiled and libraries made ready outside of a capture
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _overwrite_freed_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        pieces = [torch.full((1 << 20,), torch.nan, device=device) for _ in range(kept >> 22)]
        del pieces


def _bits(logits: Tensor) -> Tensor:
    return logits.view(torch.int16)
