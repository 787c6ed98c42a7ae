"""Syncs through a transport of the test's choice, from a trainer group or from a trainer in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fp8rl.models import Model
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.types import Endpoint
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.weight_sync.bridge import SendTask, SyncReport, send_and_verify, send_shard
from fp8rl.weight_sync.manifest import Manifest
from fp8rl.weight_sync.transports import Transport
from tests.support.definitions import every_tensor


def push(
    trainer: Any, transport: Transport, spec: QuantSpec, endpoints: Sequence[Endpoint], version: int
) -> tuple[Manifest, SyncReport, list[str]]:
    """What was sent, the report, and a line for each tensor that differs."""

    task = SendTask(transport, spec, list(endpoints), version)

    def send() -> list[Any]:
        return trainer.apply(send_shard, task) if isinstance(trainer, TrainerGroup) else [send_shard(trainer, task)]

    return send_and_verify(send, spec, endpoints, version)


def ragged() -> tuple[dict[str, torch.Tensor], Model]:
    """Weights of which some are no whole number of blocks."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (129,), "lm_head.weight": (7, 130)}
    shapes |= {f"model.layers.{layer}.mlp.up_proj.weight": (200 + layer, 131) for layer in range(6)}
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return made, every_tensor(layers=6)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
