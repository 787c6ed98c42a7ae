"""Syncs through a transport of the test's choice, from a trainer group or from a trainer in this process."""

from collections.abc import Sequence
from typing import Any

from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.types import Endpoint
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.weight_sync.bridge import SendTask, SyncReport, Transport, send_and_verify, send_shard
from fp8rl.weight_sync.manifest import Manifest


def push(
    trainer: Any, transport: Transport, spec: QuantSpec, endpoints: Sequence[Endpoint], version: int
) -> tuple[Manifest, SyncReport, list[str]]:
    """What was sent, the report, and a line for each tensor that differs."""
    task = SendTask(transport, spec, list(endpoints), version)

    def send() -> list[Any]:
        return trainer.apply(send_shard, task) if isinstance(trainer, TrainerGroup) else [send_shard(trainer, task)]

    return send_and_verify(send, spec, endpoints, version)
