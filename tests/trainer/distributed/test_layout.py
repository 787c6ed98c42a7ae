"""Places of ranks, as they are calculated. That Megatron gives the same, `parallel.initialize` checks itself."""

from __future__ import annotations

from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout


def test_every_rank_has_a_place_of_its_own() -> None:
    config = TrainerSection(tp=2, pp=2, ep=4, dp=2)
    places = [Layout.of(rank, config) for rank in range(config.world_size)]
    assert len({(at.pp_rank, at.dp_rank, at.tp_rank) for at in places}) == config.world_size == 8
    assert [(at.ep_rank, at.expert_dp_rank, at.expert_dp_size) for at in places] == [(r % 4, 0, 1) for r in range(8)]
    assert [at.rank for at in places if at.is_reporting_rank] == [4, 6]
    assert [at.rank for at in places if at.pp_rank == 0] == [0, 1, 2, 3]


def test_ranks_that_share_rows_are_neighbours_and_hold_the_same_weights() -> None:
    config = TrainerSection(tp=2, cp=2, dp=2, ep=8)
    places = [Layout.of(rank, config) for rank in range(config.world_size)]
    assert [(at.replica, at.cp_rank, at.tp_rank) for at in places] == [
        (replica, own, part) for replica in range(2) for own in range(2) for part in range(2)
    ]
    assert {(at.dp_size, at.replicas, at.expert_dp_size) for at in places} == {(4, 2, 1)}
    assert [at.rank for at in places if at.is_reporting_rank] == [0, 4]
