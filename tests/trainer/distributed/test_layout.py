"""Places of ranks, their devices, and what they gather: attention over shared rows, the pieces of a checkpoint."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import patches
from fp8rl.trainer.modules.rows import gathered, own_positions, shared_attention
from tests.support.ranks import run_on_ranks
from tests.support.trainers import trainer_on


def test_every_rank_has_a_place_of_its_own() -> None:
    config = TrainerSection(tp=2, pp=2, ep=4, dp=2)
    places = [Layout.of(rank, config) for rank in range(config.world_size)]
    assert len({(at.pp_rank, at.dp_rank, at.tp_rank) for at in places}) == config.world_size == 8
    assert [(at.ep_rank, at.expert_dp_rank, at.expert_dp_size) for at in places] == [(r % 4, 0, 1) for r in range(8)]
    assert [at.rank for at in places if at.is_reporting_rank] == [4, 6]
    assert [at.rank for at in places if at.pp_rank == 0] == [0, 1, 2, 3]
    # Ranks that share rows are neighbours and hold the same weights.
    config = TrainerSection(tp=2, cp=2, dp=2, ep=8)
    places = [Layout.of(rank, config) for rank in range(config.world_size)]
    assert [(at.replica, at.cp_rank, at.tp_rank) for at in places] == list(itertools.product(range(2), repeat=3))
    assert {(at.dp_size, at.replicas, at.expert_dp_size) for at in places} == {(4, 2, 1)}
    assert [at.rank for at in places if at.is_reporting_rank] == [0, 4]


WIDTH, SCALE = 1160, 0.2
"""More than a chunk of keys, and no whole number of splits for a rank."""


def tensors():
    random = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    return [torch.randn(2, WIDTH, count, 16, generator=random).bfloat16() for count in heads]


def attended(layout: Layout, config: TrainerSection):
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    mine = own_positions(WIDTH, layout.cp_rank, layout.cp_size)
    *leaves, dout = (x[:, mine].contiguous().requires_grad_() for x in tensors())
    out = shared_attention(*leaves, mine.expand(2, -1), SCALE, group)
    out.backward(dout.detach())
    found = [gathered(x.detach(), group) for x in (out, *(leaf.grad for leaf in leaves))]
    part = torch.zeros(2, len(mine), requires_grad=True)
    whole = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    (gathered(part, group) * whole).sum().backward()
    return {"found": found, "own": part.grad, "expected": whole[:, mine]}


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one_forward_and_backward(tmp_path: Path) -> None:
    q, k, v, dout = (x.requires_grad_() for x in tensors())
    out = ops.attention(q, k, v, torch.arange(WIDTH).expand(2, -1), SCALE)
    out.backward(dout.detach())
    for rank in run_on_ranks(TrainerSection(cp=2), tmp_path, attended):
        for found, expected in zip(rank["found"], (out, q.grad, k.grad, v.grad), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(rank["own"], rank["expected"])


def test_every_token_is_one_rank_s_and_all_ranks_see_as_many_keys() -> None:
    for ranks in (1, 2, 3, 4):
        parts = [own_positions(24 * ranks, rank, ranks) for rank in range(ranks)]
        assert sorted(torch.cat(parts).tolist()) == list(range(24 * ranks))
        assert len({int(part.sum()) for part in parts}) == 1


PIECE = 50_000


def _both_ways(path: Path, layout: Layout, config: TrainerSection):
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from fp8rl.trainer.distributed import gathering
    from fp8rl.trainer.inventory import optimizer_state

    trainer = trainer_on(layout, config, path, "bf16")
    torch.manual_seed(layout.rank)
    for _, kind, tensor in optimizer_state(trainer.optimizer):
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


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four GPUs, as torch.cuda would show them; the list receives what was made the current one."""
    patches.install()  # once in a process, so for the machine that is really here
    chosen: list[int] = []
    shown = {"is_available": lambda: True, "device_count": lambda: 4, "set_device": chosen.append}
    for name, value in (shown | {"current_device": lambda: chosen[-1] if chosen else 0}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    return chosen


def test_ranks_of_a_node_take_a_gpu_each_or_without_one_cpu(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, index in ((0, 0), (3, 3), (4, 0), (6, 2)):
        assert device.claim(rank) == torch.device("cuda", index) == device.current()
    assert gpus == [0, 3, 0, 2] and device.collectives(device.current()) == "nccl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.claim(3) == torch.device("cpu") == device.current() and device.collectives(device.current()) == "gloo"


def test_the_world_is_not_bound_to_a_gpu(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would split the group with the engines off it, and wait for the trainer's other ranks."""

    class JoinedError(Exception): ...

    def join(backend: str, **settings: object) -> None:
        assert backend == "nccl" and settings["rank"] == 2 and settings.get("device_id") is None
        raise JoinedError

    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    with pytest.raises(JoinedError):
        parallel.initialize(TrainerSection(dp=4), rank=2, host="10.0.0.1")
    assert gpus == [2]
