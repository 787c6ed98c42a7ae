"""Where the checkpoint's tensors are in an engine's model, and the adapters of its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.tensors import SCALE_SUFFIX, WHOLE, EngineRank, TensorRow, TensorTable
from fp8rl.numerics.ops import Fused, LowRank

CACHE_SCALES = {"k_scale", "v_scale"}
"""Parameters that SGLang adds to attention in some quantized models, for a cache in FP8. Nothing here uses them."""
Served = tuple[str, Tensor, Tensor]
"""A tensor of the checkpoint in an engine, as `TensorTable.views` yields it."""


def hf_tensors(
    model: nn.Module, table: TensorTable, block: int, rank: EngineRank = WHOLE, within: Set[Tensor] | None = None
) -> Iterator[Served]:
    """Return `TensorTable.views` of the parameters of a rank's model. within: look in these parameters only."""
    held = dict(model.named_parameters())  # a tied parameter once
    chosen = held if within is None else {name: each for name, each in held.items() if each in within}
    return table.views(chosen, block, rank)


def quantized_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Return each quantized parameter with its scales."""
    held = dict(model.named_parameters())
    return ((p, held[name + SCALE_SUFFIX]) for name, p in held.items() if name + SCALE_SUFFIX in held)


def check_table(model: nn.Module, definition: Model) -> None:
    """Check that the engine's model has the parameters that its table lists, no more and no less. Raises RuntimeError:
    it does not. The message names the parameters."""
    expected = definition.tensors.in_engine.keys()
    held = {name.removesuffix(SCALE_SUFFIX) for name, _ in model.named_parameters()}
    # An engine that starts without weights has made up whatever is saved with a model, its buffers too.
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    held |= model.state_dict().keys() - tied
    spare = sorted(name for name in held - expected if name.rpartition(".")[2] not in CACHE_SCALES)
    missing = sorted(expected - held)
    if spare or missing:
        raise RuntimeError(
            f"fp8rl plugin: found the parameters {spare[:5]} in the engine and {missing[:5]} not, expected those that "
            f"models/ says of {definition.architecture.name}. Install the locked version of sglang"
        )


# Adapters: SGLang knows none of them, so they stand beside its fused parameters, and our loader takes what is sent of
# them.


@dataclasses.dataclass(frozen=True)
class ServedAdapter:
    """The adapter of one of the engine's weights, or of the part that a rank holds."""

    a: nn.Parameter
    b: nn.Parameter
    """`a` and `b` are the parameters into which the adapter's tensors are loaded."""
    fused: Fused | None
    """Which of the weight's rows the rows of `b` are for; None: each row is for the weight's row of the same index."""
    low_rank: LowRank
    """The adapter as products take it. Its `b` keeps its address, which CUDA graphs read."""

    def refresh(self) -> None:
        """Update `low_rank` from the loaded parameters."""
        if self.fused is not None:
            self.low_rank.b.copy_(self.fused.wide(self.b.detach()))


class AdaptedRows:
    """Marks the rows of a forward pass that have the adapters, in an engine that also answers for the base alone.

    A request for the base has a `lora_id`. By this id SGLang also keeps its prefixes apart from other requests'.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        """most: the largest number of rows of a forward pass."""
        self.mask = torch.ones(most, dtype=torch.bool, device=device)
        """bool [most], the rows of the pass first. It keeps its address, which CUDA graphs read."""

    def take(self, batch: Any) -> None:
        """Mark the rows of SGLang's ForwardBatch: a request has one in a decode step, else one for each new token."""
        rows = torch.tensor([name is None for name in batch.lora_ids], dtype=torch.bool).to(self.mask.device)
        if not batch.forward_mode.is_decode_or_idle():
            rows = rows.repeat_interleave(batch.extend_seq_lens, output_size=len(batch.input_ids))
        self.mask[: len(rows)] = rows


@torch.no_grad()
def attach_adapters(model: nn.Module, definition: Model, rank: EngineRank) -> dict[Tensor, ServedAdapter]:
    """Register the parameters of all adapters in SGLang's model, as zeros. Return each weight's adapter."""
    config = definition.adapter
    assert config is not None
    found: dict[Tensor, ServedAdapter] = {}
    for rows in _adapted(definition, config):
        name, weight = rows[0].engine.parameter, model.get_parameter(rows[0].engine.parameter)
        counts, own = [rank.rows(row) for row in rows], [config.adapts(row) for row in rows]
        each = (len(weight),) if rows[0].expert is not None and config.experts == "per_expert" else ()
        held = sum(count for count, adapted in zip(counts, own, strict=True) if adapted)
        a = _register(model, name, "a", *each, sum(own) * config.rank, weight.shape[-1])
        b = _register(model, name, "b", *each, held, config.rank)
        fused = _fused(counts, own, config.rank).to(weight.device) if len(rows) > 1 else None
        wide = b.detach() if fused is None else fused.wide(b.detach())
        found[weight] = ServedAdapter(a, b, fused, LowRank(a.detach(), wide, config.scale, sum(own)))
    return found


def _adapted(definition: Model, config: AdapterSection) -> Iterator[Sequence[TensorRow]]:
    """Yield, for each of the engine's parameters with an adapter, its tensors of the checkpoint, in their order there.
    Of stacked experts these are the first expert's tensors."""
    for by_index in definition.tensors.in_engine.values():
        rows = next(iter(by_index.values()))
        if any(config.adapts(row) for row in rows):
            yield rows


def _fused(counts: Sequence[int], own: Sequence[bool], rank: int) -> Fused:
    """counts: each tensor's number of rows in the parameter. own: whether each tensor has an adapter."""
    number = torch.tensor([sum(own[:i]) if adapted else -1 for i, adapted in enumerate(own)])
    part = number.repeat_interleave(torch.tensor(counts))
    rows = (part >= 0).nonzero().flatten()
    return Fused.of(rows, part[rows], len(part), sum(own), rank)


def _register(model: nn.Module, weight: str, letter: str, *shape: int) -> nn.Parameter:
    """Register the adapter's parameter `letter` (a or b) beside one of the engine's weights, and return it."""
    device = model.get_parameter(weight).device
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device), requires_grad=False)
    path, _, name = weight.rpartition(".")
    model.get_submodule(path).register_parameter(name.replace("weight", f"lora_{letter}"), parameter)
    return parameter
