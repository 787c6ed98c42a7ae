"""What the driver says of a rank that Ray has ended, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from fp8rl.trainer.actor import TrainerDiedError, TrainerGroup


def test_a_rank_that_rays_memory_monitor_kills_is_a_lost_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(calls: object) -> None:
        raise ray.exceptions.OutOfMemoryError("Memory on the node was 15.2GB / 16.0GB\nand much more")

    monkeypatch.setattr("fp8rl.trainer.actor.ray.wait", lambda calls, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr("fp8rl.trainer.actor.ray.get", killed)
    rank = SimpleNamespace(apply=SimpleNamespace(remote=lambda *_: object()))
    with pytest.raises(TrainerDiedError) as lost:
        TrainerGroup([rank]).apply(print)
    assert str(lost.value) == (
        "trainer rank 0: found its process ended (Memory on the node was 15.2GB / 16.0GB), expected it to answer. "
        "Free memory there, or lower trainer.micro_batch_tokens, rollout.max_total_tokens or rollout.engines"
    )
