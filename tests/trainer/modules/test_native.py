"""Native mode against exact mode and over ranks, and the precision of a live trainer in both."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.ops.linear import multiplies_bf16
from fp8rl.trainer.config import TrainerSection
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import EXPERTS
from tests.support.ranks import run_on_ranks
from tests.support.trainers import MakeTrainer, Models, in_fp8, in_order, trainer_on

pytestmark = pytest.mark.slow

BATCH: dict[str, Any] = {"rows": 9, "longest": 150, "temperature": 0.9}
SETTINGS = {"lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 512}
PRECISIONS = ("bf16", "fp8")
LAYOUT = {"tp": 2, "ep": 2}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_every_op_but_our_products_is_megatrons(precision, moe_path, dense_path, make_trainer, monkeypatch) -> None:
    trainers = [make_trainer(path, precision, mode="native") for path in (moe_path, dense_path)]
    slow = not multiplies_bf16("cpu")
    for name, _ in inspect.getmembers(ops, inspect.isfunction):
        if name not in ("fp8_linear", "token_logprobs", "trained_operand", "weight_operand", *["linear"] * slow):
            monkeypatch.setattr(ops, name, None)
    for trainer in trainers:
        assert trainer.score(random_batch())[1].abs().mean() > 1


def test_bf16_products_are_megatrons_but_for_rounding_where_torch_has_slow_ones(moe_path, make_trainer, monkeypatch):
    batch, linear, found = random_batch(), mock.Mock(wraps=ops.linear), []
    monkeypatch.setattr(ops, "linear", linear)
    for fast in (True, False):
        for module in ("modules.native", "megatron.model"):
            monkeypatch.setattr(f"fp8rl.trainer.{module}.multiplies_bf16", lambda device, fast=fast: fast)
        trainer = make_trainer(moe_path, "bf16", mode="native")
        found.append(trainer.forward_backward(batch, cross_entropy(batch)).result)
        assert linear.called is not fast
    theirs, ours = found
    assert (ours.logprobs - theirs.logprobs).abs().mean() < 0.02
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.02)


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_it_computes_as_exact_mode_but_for_rounding(kind: str, models: Models, make_trainer: MakeTrainer) -> None:
    path = models[kind]
    bf16, fp8 = (make_trainer(path, precision, mode="native").score(random_batch())[1] for precision in PRECISIONS)
    exact = make_trainer(path, "fp8").score(random_batch())[1]
    assert 0 < (fp8 - exact).abs().mean() < 0.6 * (fp8 - bf16).abs().mean()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_probabilities_multiply_the_experts_output(precision: str, moe_path: Path, make_trainer: MakeTrainer) -> None:
    experts = make_trainer(moe_path, precision, mode="native").model.decoder.layers[0].mlp.experts
    counts = torch.tensor([3, 0, 1, 9, 2, 0, 5, 4])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(int(counts.sum()), 256, generator=generator).bfloat16()
    probs = torch.rand(len(x), generator=generator).bfloat16()
    with torch.no_grad():
        whole, _ = experts(x, counts, torch.ones_like(probs))
        weighted, _ = experts(x, counts, probs)
    assert whole.abs().mean() > 0.1 and torch.equal(weighted, whole * probs[:, None])


def steps_of(path: Path, layout, config: TrainerSection) -> dict[str, Any]:
    out, batch = {}, random_batch(**BATCH)
    for precision in PRECISIONS:
        trainer = trainer_on(layout, config, path, precision, {"mode": "native", "k_splits": 1})
        step = trainer.train_step(batch, cross_entropy(batch))
        out[precision] = step if layout.is_reporting_rank else None
    return out


def test_two_ranks_equal_one_within_rounding(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    ranks = run_on_ranks(
        TrainerSection(**SETTINGS, **LAYOUT), tmp_path / "ranks", functools.partial(steps_of, moe_path)
    )
    batch = random_batch(**BATCH)
    for precision in PRECISIONS:
        alone = make_trainer(moe_path, precision, **SETTINGS, mode="native")
        expected = alone.train_step(batch, cross_entropy(batch))
        found = ranks[0][precision]
        assert ranks[1][precision] is None
        # Rounding moves a logprob by some hundredths, and more where it sends a token to other experts.
        d = in_order(found.rows, found.result.logprobs) - in_order(expected.rows, expected.result.logprobs)
        assert 0 < d.abs()[batch.loss_mask].mean() < 0.1
        assert found.result.loss == pytest.approx(expected.result.loss, rel=0.02)
        assert found.result.grad_norm == pytest.approx(expected.result.grad_norm, rel=0.05)


@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize("moe", [True, False])
def test_a_live_trainer_changes_its_precision_and_changes_it_back(mode, moe, moe_path, dense_path, make_trainer):
    path, batch = moe_path if moe else dense_path, random_batch()
    trainer, in_bf16 = (make_trainer(path, precision, mode=mode) for precision in ("fp8", "bf16"))
    fp8, first = trainer.numerics, trainer.score(batch)[1]
    trainer.set_numerics(replace(fp8, trainer="bf16"))
    assert torch.equal(trainer.score(batch)[1], in_bf16.score(batch)[1])
    assert (trainer.score(batch)[1] - first).abs().mean() > 1e-3
    trainer.set_numerics(fp8)
    assert torch.equal(trainer.score(batch)[1], first)
    trainer.set_numerics(replace(fp8, trainer="bf16"))
    steps = [each.train_step(batch, cross_entropy(batch)).result for each in (trainer, in_bf16)]
    assert steps[0].grad_norm == steps[1].grad_norm and torch.equal(trainer.score(batch)[1], in_bf16.score(batch)[1])
    trainer.set_numerics(fp8)
    in_bf16.set_numerics(fp8)
    learned = trainer.score(batch)[1]
    assert torch.equal(learned, in_bf16.score(batch)[1]) and not torch.equal(learned, first)


@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize(("first", "last", "layers"), [(1, 0, {"1"}), (0, 1, {"0"}), (0, 0, {"0", "1"})])
def test_layers_at_the_ends_may_stay_in_bf16(mode, first, last, layers, moe_path, make_trainer) -> None:
    trainer = make_trainer(moe_path, "fp8", mode=mode)
    spec = trainer.numerics.spec.override({"first_layers_bf16": first, "last_layers_bf16": last})
    trainer.set_numerics(replace(trainer.numerics, spec=spec))
    trainer.train_step(random_batch(), cross_entropy(random_batch()))
    trainer.score(random_batch())
    used = [name.split(".") for name in in_fp8(trainer)]
    assert {parts[parts.index("layers") + 1] for parts in used} == layers
    assert len(used) == (2 + 2 * EXPERTS) * len(layers)  # qkv, o_proj, and gate_up and down of each expert


def test_another_layout_is_refused_and_changes_nothing(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8")
    numerics = trainer.numerics
    shared = numerics.spec.override({"weight": {"granularity": "tensor"}})
    with pytest.raises(UserError, match=r"numerics\.weight\.granularity"):
        trainer.set_numerics(replace(numerics, spec=shared, rollout="bf16"))
    assert trainer.numerics is numerics
