"""What the backward computes once more has the bits of what the forward would have kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.diagnose.audit import differences_of
from fp8rl.diagnose.audit.watch import watch_step
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.batches import cross_entropy, random_batch, random_routes
from tests.support.trainers import MakeTrainer

PARTS = ["attention", "experts", "layer"]
OF_LINEAR = ["attention", "layer"]
"""Its experts are those of other models."""


def routed(replay: bool) -> TokenBatch:
    batch = random_batch(temperature=0.9)
    return replace(batch, routes=random_routes(batch), replay=replay, seeds=torch.arange(batch.rows))


def passed(trainer: Any, batch: TokenBatch) -> tuple[Any, dict[str, Tensor], dict[str, int]]:
    """The result of a pass, its gradients, and how often a layer and its parts were computed."""
    calls: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        calls[name] = 0
        return lambda *_: calls.update({name: calls[name] + 1})

    layer = trainer.model.decoder.layers[0]
    experts = "mlp.experts" if hasattr(layer.mlp, "experts") else "mlp"
    names = {"attention": "self_attention.core_attention", "experts": experts, "layer": ""}
    hooks = [layer.get_submodule(path).register_forward_hook(count(name)) for name, path in names.items()]
    result = trainer.forward_backward(batch, cross_entropy(batch)).result
    for hook in hooks:
        hook.remove()
    return result, {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()}, calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("moe", "exact"),
        pytest.param("moe", "native", marks=pytest.mark.slow),
        ("dense", "exact"),
        ("dense", "native"),
        ("linear", "exact"),
    ],
)
def test_recomputing_changes_no_bit(
    kind: str, mode: str, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(f"{kind}_path")
    batches = [routed(replay=False), routed(replay=True)] if kind == "moe" else [random_batch()]
    if kind == "linear":  # which goes token by token
        batches = [random_batch(rows=3, longest=30)]
    plain = make_trainer(path, "fp8", mode=mode)
    expected = [passed(plain, batch) for batch in batches]
    for part in OF_LINEAR if kind == "linear" else PARTS:
        trainer = make_trainer(path, "fp8", mode=mode, recompute=part)
        for batch, (wanted, gradients, once) in zip(batches, expected, strict=True):
            found, again, calls = passed(trainer, batch)
            twice = {name: 2 * once[name] if part in (name, "layer") else once[name] for name in once}
            assert calls == twice, part
            assert torch.equal(found.logprobs, wanted.logprobs) and found.loss == wanted.loss
            for name in ("routes", "draws"):
                values = getattr(found, name), getattr(wanted, name)
                assert (values[0] is None) == (values[1] is None)
                assert kind == "linear" or (values[0] is None) == (kind == "dense")
                assert values[0] is None or torch.equal(*values), (part, name)
            assert all(torch.equal(again[name], gradients[name]) for name in gradients), part


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moe", "linear"])
def test_every_op_that_is_computed_once_more_is_placed_and_in_the_format_that_is_planned(
    kind: str, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(f"{kind}_path")
    batch = random_batch(rows=2, longest=12) if kind == "linear" else random_batch(rows=4, longest=40)

    def seen(**keys: Any) -> set[tuple[str, str, str]]:
        trainer = make_trainer(path, "fp8", **keys)
        sightings = watch_step(trainer, batch, cross_entropy(batch), trainer.numerics, trainer.config)
        assert differences_of(sightings) == []
        return {(each.key, each.name, each.found) for each in sightings}

    assert seen(recompute="layer", head_chunk_tokens=37) == seen()
