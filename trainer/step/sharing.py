"""Micro-batches whose rows are shared by context-parallel ranks: each has a part of every row's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core import parallel_state
from torch import Tensor

from fp8rl.trainer.distributed.context import gathered, own_positions
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.microbatches import MicroBatch


@dataclass(frozen=True, kw_only=True)
class SharedMicroBatch(MicroBatch):
    """Padded rows, of which the model of this rank takes the tokens at `positions`.

    What is read of them is gathered: all ranks of a group make the same loss of whole rows, and each takes the
    gradient of its own tokens.
    """

    positions: Tensor

    @classmethod
    def of(cls, batch: TokenBatch, rows: list[int], multiple: int) -> SharedMicroBatch:
        whole = MicroBatch.of(batch, rows, multiple).batch
        rank, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        return cls(rows, whole, positions=own_positions(whole.width, rank, ranks).to(whole.tokens.device))

    def laid(self, values: Tensor) -> Tensor:
        return values[:, self.positions]

    def by_row(self, values: Tensor, padding: int = 0) -> Tensor:
        return gathered(values, parallel_state.get_context_parallel_group())
