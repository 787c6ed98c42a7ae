"""The group of Ray actors, end to end on one machine."""

from __future__ import annotations

import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.cluster.cluster import ray_cluster
from fp8rl.trainer.actor import TrainerDiedError, TrainerGroup
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from tests.support.batches import Poisoned, cross_entropy, random_batch
from tests.support.models import LENGTH
from tests.support.servers import wait_until
from tests.support.trainers import POW2, MakeTrainer, scored

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory):
    with ray_cluster(tmp_path_factory.mktemp("cluster") / "logs"):
        yield


@pytest.fixture(scope="module")
def two_ranks(moe_path: Path):
    config = TrainerSection(lr=1e-3, warmup_steps=0, micro_batch_tokens=256, dp=2)
    group = TrainerGroup.start(TrainerSpec(moe_path, config, NumericsConfig(spec=POW2), 0, 100, LENGTH))
    yield group
    group.shutdown()


def test_two_ranks_are_one(two_ranks: TrainerGroup, moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    batch = random_batch(rows=7)
    expected = scored(make_trainer(moe_path, "fp8"), batch)
    assert torch.equal(two_ranks.score(batch), expected)
    step = two_ranks.train_step(batch, cross_entropy(batch))
    assert torch.equal(step.logprobs, expected)
    assert step.loss == pytest.approx(-expected[batch.loss_mask].mean().item(), rel=1e-5)
    assert two_ranks.weight_version == 1
    assert two_ranks.apply(lambda trainer, add: trainer.layout.rank + add, 10) == [10, 11]
    two_ranks.stage(tmp_path / "step_1", {"note": "x"}, {})
    before = two_ranks.score(batch)
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(two_ranks.write, tmp_path / "step_1")
        two_ranks.train_step(batch, cross_entropy(batch))
        written.result()
    assert two_ranks.load(tmp_path / "step_1") == {"note": "x"} and two_ranks.weight_version == 1
    assert torch.equal(two_ranks.score(batch), before)
    two_ranks.export_hf(tmp_path / "hf")
    assert torch.equal(scored(make_trainer(tmp_path / "hf", "fp8"), batch), before)


def test_what_a_rank_refuses_arrives_as_its_own_error(two_ranks: TrainerGroup, tmp_path: Path) -> None:
    """A loss that is not finite, what is no checkpoint, and a disk that is full for the rank that writes."""
    from fp8rl.trainer.step.batch import NonFiniteLossError

    batch = random_batch()
    version, before = two_ranks.weight_version, two_ranks.score(batch)
    with pytest.raises(NonFiniteLossError, match="rows") as error:
        two_ranks.train_step(batch, Poisoned(60))
    assert error.value.rows and str(error.value.rows) in str(error.value)
    with pytest.raises(UserError, match=str(tmp_path)):
        two_ranks.load(tmp_path)
    two_ranks.stage(tmp_path / "step_1", {}, {})
    two_ranks.apply(lambda trainer: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1)))
    try:
        with pytest.raises(OSError, match=r"checkpoint .*step_1: found .* MiB free on the disk") as full:
            two_ranks.write(tmp_path / "step_1")
    finally:
        two_ranks.apply(lambda trainer: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)))
    assert "\n" not in str(full.value) and list(tmp_path.iterdir()) == []
    assert two_ranks.weight_version == version and torch.equal(two_ranks.score(batch), before)


def test_a_rank_that_dies_ends_the_call_also_where_another_waits_for_it_in_a_collective(
    two_ranks: TrainerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of the group. Ray says that rank 1 is gone after rank 0 has said that its collective broke."""

    def waited(calls: list[Any], num_returns: int = 1, timeout: float | None = None) -> Any:
        if num_returns == len(calls):
            return wait(calls, num_returns=num_returns, timeout=timeout)
        done, _ = wait(calls[:1], timeout=timeout)
        return done, calls[len(done) :]

    wait = ray.wait
    monkeypatch.setattr(ray, "wait", waited)

    def reduced(trainer: Any) -> None:
        (tmp_path / str(trainer.layout.rank)).write_text(str(os.getpid()))
        if trainer.layout.rank == 1:
            time.sleep(60)
        torch.distributed.all_reduce(torch.zeros(4))

    pids = [tmp_path / "0", tmp_path / "1"]
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(two_ranks.apply, reduced)
        assert wait_until(lambda: all(file.is_file() and file.read_text() for file in pids), 20)
        time.sleep(0.5)  # in which rank 0 comes to the collective
        os.kill(int(pids[1].read_text()), signal.SIGKILL)
        with pytest.raises(TrainerDiedError, match=r"trainer rank 1: found its process ended"):
            call.result(20)
    batch = random_batch()
    with pytest.raises(TrainerDiedError, match="trainer rank"):
        two_ranks.train_step(batch, cross_entropy(batch))


def test_a_rank_that_rays_memory_monitor_kills_is_a_lost_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(calls: object) -> None:
        raise ray.exceptions.OutOfMemoryError("Memory on the node was 15.2GB / 16.0GB\nand much more")

    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr(ray, "get", killed)
    rank = SimpleNamespace(apply=SimpleNamespace(remote=lambda *_: object()))
    said = (
        r"trainer rank 0: found its process ended \(Memory on the node was 15.2GB / 16.0GB\), expected .* Free memory"
    )
    with pytest.raises(TrainerDiedError, match=said):
        TrainerGroup([rank]).apply(print)
