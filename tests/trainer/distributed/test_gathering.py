"""What ranks hand to a checkpoint, gathered in pieces, against Megatron's own gathering of whole buffers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from tests.support.ranks import run_on_ranks
from tests.support.trainers import trainer_on

PIECE = 50_000


def _both_ways(path: Path, layout: Layout, config: TrainerSection) -> list[Any]:
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from fp8rl.trainer.distributed import gathering
    from fp8rl.trainer.inventory import optimizer_state

    trainer = trainer_on(layout, config, path, "bf16")
    torch.manual_seed(layout.rank)
    for _, kind, tensor in optimizer_state(trainer):
        if kind == "moments":
            tensor.normal_()
    gathering.AT_ONCE = PIECE
    found = []
    for optimizer in trainer.optimizer.inner.chained_optimizers:
        whole = DistributedOptimizer.get_parameter_state_dp_zero(
            optimizer, use_gloo_comm=False, return_on_all_ranks=True
        )
        pieces, empty = optimizer.get_parameter_state_dp_zero(), optimizer.get_parameter_state_dp_zero(empty_data=True)
        assert whole.keys() == pieces.keys() == empty.keys()
        for (dtype, ours), theirs in zip(pieces[0].items(), whole[0].values(), strict=True):
            for key in ("param", "exp_avg", "exp_avg_sq"):
                found.append(
                    (torch.equal(ours[key], theirs[key]), bool(ours[key].any()), bool(empty[0][dtype][key].any()))
                )
            assert ours["numel_unpadded"] == theirs["numel_unpadded"]
    return found


@pytest.mark.slow
def test_pieces_make_the_buffers_that_megatron_gathers_whole(moe_path: Path, tmp_path: Path) -> None:
    """Three ranks, whose shares do not divide: the last one has padding."""
    config = TrainerSection(dp=3, micro_batch_tokens=256, lr=1e-3, warmup_steps=0)
    for found in run_on_ranks(config, tmp_path, partial(_both_ways, moe_path)):
        assert found == [(True, True, False)] * 6, "masters and both moments of dense weights and of experts"
