"""Adapters in the engine: SGLang knows none of them, so they stand beside its fused parameters, and our loader takes
what is sent of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.tensors import EngineRank, TensorRow
from fp8rl.numerics.ops import Fused, LowRank


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter of one of the engine's weights, or of the part that a rank holds.

    a, b: its parameters, as tensors are loaded into them. fused: where the rows of b stand among the weight's; None:
        where they are. low_rank: as products take it, its b made of `b` in memory that stays where it is, because CUDA
        graphs read it there.
    """

    a: nn.Parameter
    b: nn.Parameter
    fused: Fused | None
    low_rank: LowRank

    def refresh(self) -> None:
        """Make what products take anew."""
        if self.fused is not None:
            self.low_rank.b.copy_(self.fused.wide(self.b.detach()))


class AdaptedRows:
    """The rows of a forward pass that have the adapters, in an engine that answers for the base beside them too.

    A request for the base has a `lora_id`, by which SGLang also keeps its prefixes apart from those of others.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        """most: rows of a pass."""
        self.mask = torch.ones(most, dtype=torch.bool, device=device)
        """bool [most], the first of them those of the pass, in memory that stays where it is: CUDA graphs read it."""

    def take(self, batch: Any) -> None:
        """Those of SGLang's ForwardBatch, of whose requests each has one row in a decode step, else its new tokens."""
        rows = torch.tensor([name is None for name in batch.lora_ids], dtype=torch.bool).to(self.mask.device)
        if not batch.forward_mode.is_decode_or_idle():
            rows = rows.repeat_interleave(batch.extend_seq_lens, output_size=len(batch.input_ids))
        self.mask[: len(rows)] = rows


@torch.no_grad()
def attach(model: nn.Module, definition: Model, rank: EngineRank) -> dict[Tensor, Adapter]:
    """Register the parameters of all adapters in SGLang's model, as zeros: what adapts each weight."""
    config = definition.adapter
    assert config is not None
    found: dict[Tensor, Adapter] = {}
    for rows in _adapted(definition, config):
        name, weight = rows[0].engine.parameter, model.get_parameter(rows[0].engine.parameter)
        counts, own = [rank.rows(row) for row in rows], [config.adapts(row) for row in rows]
        each = (len(weight),) if rows[0].expert is not None and config.experts == "per_expert" else ()
        held = sum(count for count, adapted in zip(counts, own, strict=True) if adapted)
        a = _register(model, name, "a", *each, sum(own) * config.rank, weight.shape[-1])
        b = _register(model, name, "b", *each, held, config.rank)
        fused = _fused(counts, own, config.rank).to(weight.device) if len(rows) > 1 else None
        wide = b.detach() if fused is None else fused.wide(b.detach())
        found[weight] = Adapter(a, b, fused, LowRank(a.detach(), wide, config.scale, sum(own)))
    return found


def _adapted(definition: Model, config: AdapterSection) -> Iterator[Sequence[TensorRow]]:
    """The tensors in each of the engine's parameters that has an adapter, in their order there; of stacked experts
    those of the first."""
    for by_index in definition.tensors.in_engine.values():
        rows = next(iter(by_index.values()))
        if any(config.adapts(row) for row in rows):
            yield rows


def _fused(counts: Sequence[int], own: Sequence[bool], rank: int) -> Fused:
    """counts: rows of each tensor in the parameter. own: whether it has an adapter."""
    number = torch.tensor([sum(own[:i]) if adapted else -1 for i, adapted in enumerate(own)])
    part = number.repeat_interleave(torch.tensor(counts))
    rows = (part >= 0).nonzero().flatten()
    return Fused.of(rows, part[rows], len(part), sum(own), rank)


def _register(model: nn.Module, weight: str, letter: str, *shape: int) -> nn.Parameter:
    """The parameter of this letter beside one of the engine's weights."""
    device = model.get_parameter(weight).device
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device), requires_grad=False)
    path, _, name = weight.rpartition(".")
    model.get_submodule(path).register_parameter(name.replace("weight", f"lora_{letter}"), parameter)
    return parameter
