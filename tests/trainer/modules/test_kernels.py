"""A whole model on the Triton kernels, interpreted without a GPU, and by a forward written from docs/exactness.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.support.interpreter  # noqa: F401
from examples.upcycle import upcycle
from fp8rl.numerics.backend.implementation import using
from lab.bench.float64 import logprobs
from lab.bench.rounded import Rounded
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import write_model
from tests.support.padded import dense
from tests.support.trainers import MakeTrainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter takes a millisecond for a tile and step: one layer, one head, four experts."""
    changes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128}
    return write_model(tmp_path_factory.mktemp("small"), num_experts=4, **changes)


def test_a_row_has_the_same_logprobs_alone_and_in_a_batch(small_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(small_path, "fp8", micro_batch_tokens=4096)
    batch = random_batch(rows=2, longest=12, temperature=0.7)
    with using("triton"):
        rows, scored = trainer.score(batch)
        _, (alone,) = trainer.score(batch.select([0]))
    together = scored[torch.tensor(rows).argsort()][0]
    assert alone[1:].abs().min() > 0
    assert torch.equal(alone, together)


def test_loss_and_gradients_are_close_to_the_definitions(small_path: Path, make_trainer: MakeTrainer) -> None:
    """In FP8, in which the router, the embedding and the head are products in BF16."""
    batch, found = random_batch(rows=3, longest=12), {}
    for implementation in ("torch", "triton"):
        with using(implementation):
            trainer = make_trainer(small_path, "fp8")
            result = trainer.forward_backward(batch, cross_entropy(batch)).result
        found[implementation] = (result, {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()})
    (expected, gradients), (result, others) = found["torch"], found["triton"]
    assert abs(result.loss - expected.loss) < 2e-3 * expected.loss
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() < 0.1 * gradient.norm(), name


@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
def test_a_second_forward_agrees_with_the_trainer(mixture: bool, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    path = dense(tmp_path / "dense", torch.bfloat16)
    if mixture:
        upcycle(path, path := tmp_path / "mixture", layers=1)
    batch, forward = random_batch(), Rounded(path)
    rows, scored = make_trainer(path, precision="fp8").score(batch)
    apart = []
    for row, found in zip(rows, scored, strict=True):
        tokens, targets = batch.tokens[row], int(batch.lengths[row]) - 1
        expected = logprobs(forward(tokens), tokens, len(tokens) - 1)
        apart.append((found[1:] - expected)[:targets].abs())
    assert torch.cat(apart).le(1e-6).float().mean() >= 0.98
