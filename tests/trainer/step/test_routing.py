"""Routing in the trainer: replay against transformers with the same experts forced; biases, moved by load alone."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from tests.support.batches import cross_entropy, random_batch, random_routes
from tests.support.models import EXPERTS, LAYERS, TOP_K, reference, write_model
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.trainers import MakeTrainer, in_order

BATCH: dict[str, Any] = {"rows": 9, "longest": 50, "temperature": 0.9}
MODES = ["exact", "native"]
pytestmark = pytest.mark.slow


def unknown(batch: TokenBatch) -> Tensor:
    return torch.full((batch.rows, batch.width, LAYERS, TOP_K), UNKNOWN, dtype=torch.int16)


def score(trainer: Any, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities and own routes in the order of the batch."""
    rows, found = trainer.score_routed(batch)
    return in_order(rows, found.logprobs), in_order(rows, found.routes)


@contextmanager
def forced(model, routes: Tensor):
    """A transformers model with the experts of one row, int16 [S, L, K], where they are not -1.

    Yields the list of its own choices, int64 [S, K] of each layer.
    """
    own: list[Tensor] = []

    def hook(layer: int):
        def replaced(gate: Any, inputs: Any, output: Any) -> Any:
            logits, _, chosen = output
            own.append(chosen.sort(-1).values)
            wanted = routes[:, layer].long()
            experts = torch.where(wanted < 0, chosen, wanted)
            weights = logits.softmax(-1).gather(1, experts)
            return logits, weights / weights.sum(-1, keepdim=True), experts

        return replaced

    handles = [layer.mlp.gate.register_forward_hook(hook(index)) for index, layer in enumerate(model.model.layers)]
    try:
        yield own
    finally:
        for handle in handles:
            handle.remove()


def oracle_logprobs(model, batch: TokenBatch, routes: Tensor) -> tuple[list[Tensor], Tensor]:
    """Log-probabilities [length - 1] of each row, and own routes int16 [B, S, L, K], of transformers."""
    logprobs, own = [], unknown(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[row : row + 1, :length]
        with forced(model, routes[row, :length]) as choices:
            logits = model(tokens).logits[0, :-1] / batch.temperature
        logprobs.append(logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0])
        own[row, :length] = torch.stack(choices, dim=1).to(torch.int16)
    return logprobs, own


@pytest.mark.parametrize("mode", MODES)
def test_replaying_its_own_choice_changes_no_bit(mode: str, moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8", mode=mode)
    batch = random_batch(**BATCH)
    rows, plain = trainer.score(batch)
    recorded, own = score(trainer, replace(batch, routes=unknown(batch)))
    assert torch.equal(recorded[rows], plain)
    real = batch.real_tokens()
    assert (own[~real] == UNKNOWN).all()
    assert own[real].min() == 0 and own[real].max() == EXPERTS - 1 and (own[real].diff(dim=-1) > 0).all()
    for routes in (own, unknown(batch)):
        replayed, again = score(trainer, replace(batch, routes=routes, replay=True))
        assert torch.equal(replayed, recorded) and torch.equal(again, own)


@pytest.mark.parametrize("mode", MODES)
def test_replay_is_transformers_with_these_experts(mode: str, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    path = write_model(tmp_path / "m", dtype=torch.float32)
    trainer, model = make_trainer(path, dtype=torch.float32, mode=mode), reference(path)
    batch = random_batch(**BATCH)
    batch = replace(batch, routes=random_routes(batch), replay=True)
    logprobs, own = oracle_logprobs(model, batch, batch.routes)
    expected = torch.cat(logprobs)
    (-expected.sum() / batch.loss_mask.sum()).backward()
    unforced, _ = score(trainer, replace(batch, replay=False))
    done = trainer.forward_backward(batch, cross_entropy(batch))
    found, recorded = in_order(done.rows, done.result.logprobs), in_order(done.rows, done.result.routes)
    torch.testing.assert_close(found[batch.loss_mask], expected.detach(), rtol=0, atol=2e-5)
    assert (found - unforced).abs().mean() > 0.1
    # Equal but for near-ties of the float32 gates.
    assert (recorded == own)[batch.real_tokens()].float().mean() > 0.995
    for theirs, ours in zip(model.model.layers, trainer.model.decoder.layers, strict=True):
        gradient = theirs.mlp.gate.weight.grad
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(ours.mlp.router.weight.main_grad, gradient, rtol=1e-3, atol=1e-6)


def test_the_probabilities_of_replayed_experts_by_hand() -> None:
    """Softmax of ln(1, 2, 3, 4) is 0.1, 0.2, 0.3, 0.4; experts 0 and 2 are replayed."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log().requires_grad_()
    probs, experts = ops.route(logits, 2, True, torch.tensor([[2, 0]]))
    assert experts.tolist() == [[0, 2]]
    torch.testing.assert_close(probs, torch.tensor([[0.25, 0.75]]))
    probs[0, 1].backward()
    # d(p2 / (p0 + p2)) / dlogit: 0.75 * 0.25 for expert 2, the opposite for expert 0, nothing for the others.
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.1875, 0.0, 0.1875, 0.0]]))
    unscaled, _ = ops.route(logits.detach(), 2, False, torch.tensor([[2, 0]]))
    torch.testing.assert_close(unscaled, torch.tensor([[0.1, 0.3]]))


def test_routes_that_do_not_fit_are_refused(moe_path: Path, dense_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path)
    batch = random_batch(**BATCH)
    routes = random_routes(batch)
    with pytest.raises(ValueError, match=r"routes: found \[1, 2\] .* expected \[2, 2\]"):
        trainer.score(replace(batch, routes=routes[:, :, :1].contiguous()))
    for experts in ([3, 3], [0, EXPERTS], [-1, 4], [-2, 4]):
        wrong = routes.clone()
        wrong[4, 1, 1] = torch.tensor(experts)
        with pytest.raises(ValueError, match=r"row 4, token 1, layer 1 \(and 0 like it\), expected different ones"):
            trainer.score(replace(batch, routes=wrong, replay=True))
    with pytest.raises(ValueError, match=r"routes: found \[2, 2\] .* expected \[0, 0\]"):
        make_trainer(dense_path).score(replace(batch, routes=routes))


def test_a_pass_without_routes_reports_none(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer, batch = make_trainer(moe_path), random_batch(**BATCH)
    score(trainer, replace(batch, routes=random_routes(batch), replay=True))
    after = trainer.score_routed(batch)[1]
    assert after.routes is None and torch.equal(after.logprobs, make_trainer(moe_path).score(batch)[1])


GLM = TinyModel(layers=3, hidden=256, heads=2, kv_heads=2, intermediate=256, experts=8, top_k=3, family="glm4_moe")
RATE = 2.0**-10
BIASES = ("model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.2.mlp.gate.e_score_correction_bias")


@pytest.fixture(scope="module")
def glm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm") / "model"
    write_tiny_model(path, GLM)
    return path


def biases(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights.share(trainer.model) if name in BIASES}


@pytest.mark.parametrize("mode", ["exact", "native"])
def test_an_update_moves_every_bias_towards_the_mean_load(mode: str, glm_path: Path, make_trainer: MakeTrainer) -> None:
    batch = random_batch()
    trainer = make_trainer(glm_path, "fp8", mode=mode, router_bias_rate=RATE)
    for _ in range(2):
        before = biases(trainer)
        routes = torch.full((batch.rows, batch.width, 2, GLM.top_k), UNKNOWN, dtype=torch.int16)
        chosen = trainer.score_routed(replace(batch, routes=routes))[1].routes
        trainer.forward_backward(batch, cross_entropy(batch))
        assert all(torch.equal(bias, before[name]) for name, bias in biases(trainer).items())  # a gate may withhold it
        trainer.update()
        after = biases(trainer)
        for layer, name in enumerate(BIASES):
            load = chosen[:, :, layer][chosen[:, :, layer] != UNKNOWN].long().bincount(minlength=GLM.experts).double()
            assert load.sum() == batch.lengths.sum() * GLM.top_k
            assert torch.equal(after[name] - before[name], RATE * torch.sign(load.mean() - load).float())
    still = make_trainer(glm_path, "fp8", mode=mode)
    still.train_step(batch, cross_entropy(batch))
    assert not torch.cat(list(biases(still).values())).any()
