"""What the backward computes once more has the bits of what the forward would have kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.batches import cross_entropy, random_batch, random_routes
from tests.support.trainers import MakeTrainer, gradients, spread

PARTS = ["attention", "layer", "experts"]
MLPS = AdapterSection(rank=8, targets=("gate_proj", "up_proj", "down_proj"))
LATENTS = AdapterSection(rank=8, targets=("kv_b_proj",))


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
    return result, gradients(trainer), calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode", "adapter"),
    [
        *((kind, mode, None) for kind in ("moe", "dense") for mode in ("exact", "native")),
        ("linear", "exact", None),
        ("latent", "exact", None),
        ("latent", "exact", LATENTS),
        ("moe", "exact", MLPS),
    ],
)
def test_recomputing_changes_no_bit(
    kind: str, mode: str, adapter: Any, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    """Adapters of the first layer have a gradient too, where nothing before them is trained."""
    path: Path = request.getfixturevalue(f"{kind}_path")
    batches = [routed(replay=False), routed(replay=True)] if kind == "moe" else [random_batch()]
    if kind == "linear":  # which goes token by token
        batches = [random_batch(rows=3, longest=30)]

    def made(**keys: str) -> Any:
        trainer = make_trainer(path, "fp8", mode=mode, adapter=adapter, **keys)
        spread(trainer)
        return trainer

    plain = made()
    expected = [passed(plain, batch) for batch in batches]
    for part in PARTS[:2] if kind == "linear" else PARTS:  # its experts are those of other models
        trainer = made(recompute=part)
        for batch, (wanted, sums, once) in zip(batches, expected, strict=True):
            found, again, calls = passed(trainer, batch)
            twice = {name: 2 * once[name] if part in (name, "layer") else once[name] for name in once}
            assert calls == twice, part
            assert torch.equal(found.logprobs, wanted.logprobs) and found.loss == wanted.loss
            for name in ("routes", "draws"):
                values = getattr(found, name), getattr(wanted, name)
                assert (values[0] is None) == (values[1] is None) == (kind != "moe")
                assert values[0] is None or torch.equal(*values), (part, name)
            assert all(torch.equal(again[name], sums[name]) for name in sums), part
            assert len(sums) >= 4 and all(each.any() for each in sums.values())
