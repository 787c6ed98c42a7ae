"""Calculates the place of a rank in each of the trainer's parallel groups.

The order is Megatron's. Tensor-parallel ranks have consecutive numbers. Context-parallel ranks come next, then
data-parallel replicas, and pipeline stages last. Expert-parallel ranks have consecutive numbers within a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8rl.trainer.config import TrainerSection


@dataclass(frozen=True)
class Layout:
    """The place of a rank. It has part `tp_rank` of its stage's dense weights and part `ep_rank` of its experts."""

    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    """The rank's place among the ranks that hold the same dense weights."""
    dp_size: int
    cp_rank: int
    """The rank's place among the context-parallel ranks, which split the tokens of the same rows."""
    cp_size: int
    ep_rank: int
    ep_size: int
    expert_dp_rank: int
    """The rank's place among the ranks that hold the same experts."""
    expert_dp_size: int

    @classmethod
    def of(cls, rank: int, config: TrainerSection) -> Layout:
        """Calculate the place of rank number `rank`."""
        stage_size = config.stage_size
        stage, inside = divmod(rank, stage_size)
        return cls(
            rank=rank,
            tp_rank=inside % config.tp,
            tp_size=config.tp,
            pp_rank=stage,
            pp_size=config.pp,
            dp_rank=inside // config.tp,
            dp_size=config.copies,
            cp_rank=inside // config.tp % config.cp,
            cp_size=config.cp,
            ep_rank=inside % config.ep,
            ep_size=config.ep,
            expert_dp_rank=inside // config.ep,
            expert_dp_size=stage_size // config.ep,
        )

    @property
    def is_reporting_rank(self) -> bool:
        """True if this is the rank that returns the results of its data-parallel replica."""
        return self.pp_rank == self.pp_size - 1 and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def replica(self) -> int:
        """Index of the data-parallel replica that this rank belongs to."""
        return self.dp_rank // self.cp_size

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas, over which a batch's rows are split."""
        return self.dp_size // self.cp_size

    @property
    def tp_group(self) -> Any:
        """The process group of the tensor-parallel ranks, which hold the parts of the same dense weights."""
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_group()

    @property
    def dp_group(self) -> Any:
        """The process group of the ranks that hold the same dense weights."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group(with_context_parallel=True)
