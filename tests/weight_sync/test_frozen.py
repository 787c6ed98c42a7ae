"""What a sync of adapters sends, and the proof on the trainer's side that the weights beside them stay as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.delta import LastSent
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.weight_cache import Frozen, freeze
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE
from fp8rl.weight_sync.frozen import FrozenBase, check_frozen
from fp8rl.weight_sync.manifest import ShardDigests, SyncError
from tests.support.served_model import SPEC

ADAPTER = AdapterSection(rank=8, alpha=16.0)
BASE = {"x.weight": "one", "x.weight_scale_inv": "two"}


def sent(base: dict[str, str], adapters: dict[str, str]) -> ShardDigests:
    return ShardDigests(base | adapters, 100 + 7, 100 + 7, frozenset(adapters), 7)


def test_adapters_go_alone_to_engines_that_hold_what_was_last_proven() -> None:
    held = FrozenBase()
    assert held.contents(3) == "weights and adapters"
    held.completed([sent(BASE, {"a": "first"})], ADAPTER, "weights and adapters")
    held.version = 3
    assert held.contents(3) == "adapters"
    assert held.contents(2) == held.contents(None) == "weights and adapters"  # an engine that came back, or sleeps
    parts = held.completed([sent({}, {"a": "second"})], ADAPTER, "adapters")
    digests = {name: digest for part in parts for name, digest in part.digests.items()}
    assert digests == BASE | {"a": "second", ADAPTER_SCALE: "2.0"}
    assert held.sent is not None and held.sent.weight_bytes == 100


def test_a_trainer_that_sends_another_base_is_refused_by_name() -> None:
    held = FrozenBase()
    held.completed([sent(BASE, {})], ADAPTER, "weights and adapters")
    with pytest.raises(SyncError, match=r"base changed under the run(.|\n)*x\.weight: found other, expected one"):
        held.completed([sent(BASE | {"x.weight": "other"}, {})], ADAPTER, "weights and adapters")


def trainer_of(model: nn.Module) -> Any:
    return SimpleNamespace(model=model, last_sent=LastSent())


def test_a_frozen_parameter_that_changes_is_named_and_a_trained_one_may() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    trainer = trainer_of(model)
    check_frozen(trainer)
    with torch.no_grad():
        model[1].weight.add_(1)
        check_frozen(trainer)
        model[0].weight[3, 4] += 1e-3
    with pytest.raises(SyncError, match=r"base changed under the run(.|\n)*0\.weight: found"):
        check_frozen(trainer)


def test_a_weight_that_is_read_from_codes_is_digested_there() -> None:
    model = nn.Linear(128, 128, bias=False)
    codes = quantize(model.weight.detach().bfloat16(), SPEC.weight)
    trainer = trainer_of(model)
    check_frozen(trainer)
    freeze(model.weight, Frozen(codes))
    check_frozen(trainer)
    codes.data.view(torch.uint8)[5, 6] ^= 1
    with pytest.raises(SyncError, match="codes of weight"):
        check_frozen(trainer)
