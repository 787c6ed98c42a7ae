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
    parameters = dict(model.named_parameters())
    return ((p, parameters[name + SCALE_SUFFIX]) for name, p in parameters.items() if name + SCALE_SUFFIX in parameters)


def check_table(model: nn.Module, definition: Model) -> None:
    """Check that the engine's model has exactly the parameters that its table lists. Raises RuntimeError, which names
    missing and further parameters."""
    expected = definition.tensors.in_engine.keys()
    names = {name.removesuffix(SCALE_SUFFIX) for name, _ in model.named_parameters()}
    # An engine that starts without weights has made up whatever is saved with a model, its buffers too.
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= model.state_dict().keys() - tied
    spare = sorted(name for name in names - expected if name.rpartition(".")[2] not in CACHE_SCALES)
    missing = sorted(expected - names)
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
    """The rows of the weight to which the rows of `b` belong; None: each belongs to the row of the same index."""
    low_rank: LowRank
    """The adapter as products take it. Its `b` keeps its address, which CUDA graphs read."""

    def refresh(self) -> None:
        """Update `low_rank` from the loaded parameters."""
        if self.fused is not None:
            self.low_rank.b.copy_(self.fused.wide(self.b.detach()))


class AdaptedRows:
    """Marks the rows of a forward pass that have the adapters, in an engine that also serves the model without them.

    A request for the model without adapters has a `lora_id`. By this id SGLang also caches its prefixes separately.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        """most: the largest number of rows of a forward pass."""
        self.mask = torch.ones(most, dtype=torch.bool, device=device)
        """bool [most], the rows of the pass first. It keeps its address, which CUDA graphs read."""

    def take(self, batch: Any) -> None:
        """Mark the rows of a ForwardBatch: each request has one row in a decode step, else a row for each new token."""
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
        stack = (len(weight),) if rows[0].expert is not None and config.experts == "per_expert" else ()
        adapted_rows = sum(count for count, adapted in zip(counts, own, strict=True) if adapted)
        a = _register(model, name, "a", *stack, sum(own) * config.rank, weight.shape[-1])
        b = _register(model, name, "b", *stack, adapted_rows, config.rank)
        fused = _fused(counts, own, config.rank).to(weight.device) if len(rows) > 1 else None
        wide = b.detach() if fused is None else fused.wide(b.detach())
        found[weight] = ServedAdapter(a, b, fused, LowRank(a.detach(), wide, config.scale, sum(own)))
    return found


def _adapted(definition: Model, config: AdapterSection) -> Iterator[Sequence[TensorRow]]:
    """Yield for each of the engine's parameters with an adapter the checkpoint's tensors in it, in order. A stack of
    experts stands for the tensors of its first expert."""
    for by_index in definition.tensors.in_engine.values():
        rows = next(iter(by_index.values()))
        if any(config.adapts(row) for row in rows):
            yield rows


def _fused(counts: Sequence[int], own: Sequence[bool], rank: int) -> Fused:
    """Map the rows of B to a parameter. counts: the rows of each tensor in it. own: whether each has an adapter."""
    number = torch.tensor([sum(own[:i]) if adapted else -1 for i, adapted in enumerate(own)])
    part = number.repeat_interleave(torch.tensor(counts))
    rows = (part >= 0).nonzero().flatten()
    return Fused.of(rows, part[rows], len(part), sum(own), rank)


def _register(model: nn.Module, weight: str, letter: str, *shape: int) -> nn.Parameter:
    """Register the parameter `letter` (a or b) of an adapter in the module of its weight, and return the parameter."""
    device = model.get_parameter(weight).device
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device), requires_grad=False)
    path, _, name = weight.rpartition(".")
    model.get_submodule(path).register_parameter(name.replace("weight", f"lora_{letter}"), parameter)
    return parameter
