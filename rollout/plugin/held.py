"""Places of the checkpoint's tensors in an engine's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.tensors import SCALE_SUFFIX, WHOLE, EngineRank, TensorRow, TensorTable

Served = tuple[str, Tensor, Tensor]
"""A tensor's name in the checkpoint, of a part of it as the rank labels it, the engine's parameter that holds it, and
where in that."""


def hf_tensors(
    model: nn.Module, table: TensorTable, block: int, rank: EngineRank = WHOLE, within: Set[Tensor] | None = None
) -> Iterator[Served]:
    """Yield what this rank has of the checkpoint, and scales of what is quantized by `block` rows; within: in
    these parameters alone."""
    held = dict(_held(model, table))
    for name, by_index in table.in_engine.items():
        for suffix, rows in (("", 1), (SCALE_SUFFIX, block)):
            parameter = held[name] if not suffix else held.get(name + suffix)
            if parameter is not None and (within is None or parameter in within):
                yield from _split(parameter, table, by_index, suffix, rows, rank)


def quantized_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Each with its scales."""
    held = dict(model.named_parameters())
    return ((p, held[name + SCALE_SUFFIX]) for name, p in held.items() if name + SCALE_SUFFIX in held)


def check_table(model: nn.Module, definition: Model) -> None:
    """Refuse a model of the engine that does not hold what the table says, no more and no less.

    Raises:
        RuntimeError: it names the parameters.
    """
    expected = definition.tensors.in_engine.keys()
    held = {name.removesuffix(SCALE_SUFFIX) for name, _ in _held(model, definition.tensors)}
    # An engine that starts without weights has made up whatever is saved with a model, its buffers too.
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    held |= model.state_dict().keys() - tied
    extras = definition.architecture.engine_extras
    spare = sorted(name for name in held - expected if name.rpartition(".")[2] not in extras)
    missing = sorted(expected - held)
    if spare or missing:
        raise RuntimeError(
            f"fp8rl plugin: found the parameters {spare[:5]} in the engine and {missing[:5]} not, expected those that "
            f"models/ says of {definition.architecture.name}. Install the locked version of sglang"
        )


def _held(model: nn.Module, table: TensorTable) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, tied ones once, and the buffers that the table has."""
    yield from model.named_parameters()
    buffers = {
        name for name, by_index in table.in_engine.items() for rows in by_index.values() if rows[0].engine.buffer
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in buffers)


def _split(
    held: Tensor,
    table: TensorTable,
    by_index: Mapping[int | None, Sequence[TensorRow]],
    suffix: str,
    block: int,
    rank: EngineRank,
) -> Iterator[Served]:
    for index, rows in by_index.items():
        fused = held.detach()
        if index is not None:
            place = rank.place(index, len(held))
            if place is None:
                continue  # an expert of another rank
            fused = fused[place]
        for row, part in zip(rows, table.engine_parts(fused, rows, block, rank), strict=True):
            yield rank.label(row.name + suffix, row), held, part
