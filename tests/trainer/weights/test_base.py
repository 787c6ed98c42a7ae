"""A frozen model that reads its weights from a base in the engine's layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8rl.models.shared_base import SharedBase, base_bytes
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.weight_sync.served import served_tensors
from tests.support.batches import random_batch
from tests.support.models import LENGTH


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_model_on_a_base_scores_the_same_and_holds_nothing_twice(
    kind: str, layout: Layout, request: pytest.FixtureRequest
) -> None:
    from fp8rl.trainer.scorer import Scorer

    path: Path = request.getfixturevalue(f"{kind}_path")
    spec = QuantSpec.preset("fp8_block_pow2")
    model = Scorer(path, TrainerSection(), NumericsConfig(spec=spec), layout, max_sequence_length=LENGTH)
    model.model.requires_grad_(False)
    batch = random_batch(rows=3, longest=40)
    before = model.score(batch)[1].clone()

    def served() -> Mapping[str, Tensor]:
        return dict(served_tensors(model.weights.share(model.model), spec, model.definition))

    base = SharedBase(torch.zeros(base_bytes(model.definition, spec), dtype=torch.uint8), model.definition, spec)
    handed_out = {name: tensor.clone() for name, tensor in served().items()}
    for name, tensor in handed_out.items():
        base.tensors[name].copy_(tensor)
    assert model.adopt(base) == 0
    assert torch.equal(model.score(batch)[1], before)
    again = served()
    assert again.keys() == handed_out.keys()
    for name, tensor in handed_out.items():
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name
    shared = base.flat.untyped_storage().data_ptr()
    own = [p for p in model.model.parameters() if p.untyped_storage().data_ptr() != shared]
    assert sum(p.untyped_storage().nbytes() for p in own) == 2 * len(own), "a stand-in is one element"
    assert not list(model.cache.operands())
