"""Training steps on one rank: learning, gradients, failures, what is computed once, and a padded model's zeros."""

from __future__ import annotations

import gc
import shutil
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8rl.models.checkpoint.padding import padded, unpadded
from fp8rl.numerics import ops
from fp8rl.numerics.core.errors import UserError
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.megatron.lowering import Lowering
from tests.support.batches import Entropy, Poisoned, cross_entropy, random_batch
from tests.support.models import reference
from tests.support.padded import QWEN2, logits, weights, whole_blocks, write
from tests.support.trainers import MakeTrainer, scored

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["exact", "native"])
def test_a_tiny_batch_is_overfitted(mode: str, moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer, batch = make_trainer(moe_path, "fp8", lr=3e-3, mode=mode), random_batch(rows=4, longest=12)
    losses = [trainer.train_step(batch, cross_entropy(batch)).result.loss for _ in range(30 if mode == "exact" else 20)]
    assert losses[0] > 3 and losses[-1] < 0.1


def test_a_frequent_tokens_embedding_gradient_is_not_lost_in_bf16(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path)
    embedding = trainer.model.embedding.word_embeddings
    trainer.optimizer.zero_grad()
    embedding(torch.zeros(1, 4096, dtype=torch.int64)).float().sum().backward()
    assert embedding.weight.main_grad[0, 0] == 4096


@pytest.mark.parametrize("in_gradient", [False, True])
def test_a_nonfinite_loss_changes_nothing(in_gradient: bool, moe_path: Path, make_trainer: MakeTrainer) -> None:
    from fp8rl.trainer.step.batch import NonFiniteLossError

    trainer = make_trainer(moe_path)
    batch = random_batch()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    named = "gradient norm" if in_gradient else r"rows \[0, "
    with pytest.raises(NonFiniteLossError, match=named):
        trainer.train_step(batch, Poisoned(60, in_gradient))
    assert trainer.weight_version == 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    with pytest.raises(RuntimeError, match="no gradients"):
        trainer.update()
    fresh = make_trainer(moe_path)
    passes = [t.forward_backward(batch, cross_entropy(batch)).result for t in (trainer, fresh)]
    assert passes[0].loss == passes[1].loss and passes[0].grad_norm == passes[1].grad_norm
    assert trainer.update() == fresh.update() == 1e-3


def test_gradients_that_are_not_applied_are_forgotten(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer, fresh = make_trainer(moe_path), make_trainer(moe_path)
    dropped, batch = random_batch(seed=1), random_batch(seed=2)
    before = trainer.score(batch)[1]
    trainer.forward_backward(dropped, cross_entropy(dropped))
    assert torch.equal(trainer.score(batch)[1], before)
    results = [t.train_step(batch, cross_entropy(batch)).result for t in (trainer, fresh)]
    assert results[0].grad_norm == results[1].grad_norm and torch.equal(trainer.score(batch)[1], fresh.score(batch)[1])


def test_weights_are_quantized_once(moe_path: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []
    one = ops.trained_operand
    monkeypatch.setattr(ops, "trained_operand", lambda w, spec: calls.append(w) or one(w, spec))
    trainer = make_trainer(moe_path, "fp8", micro_batch_tokens=64)
    batch = random_batch()
    quantized = 2 * (2 + 2)  # per layer: qkv, proj, and two stacks of experts
    trainer.score(batch)
    trainer.train_step(batch, cross_entropy(batch))
    assert len(calls) == quantized
    trainer.score(batch)
    assert len(calls) == 2 * quantized


def test_learning_rate_schedules(moe_path: Path, make_trainer: MakeTrainer) -> None:
    from fp8rl.trainer.distributed.optimizer import schedule

    made = cache(lambda min_lr: make_trainer(moe_path, lr=1.0, min_lr=min_lr).optimizer.inner)

    def rates(steps: int, **changes) -> list[float]:
        optimizer = made(changes.get("min_lr", 0.0))
        timetable = schedule(optimizer, TrainerSection(lr=1.0, **changes), steps)
        out = []
        for _ in range(steps):
            timetable.step(1)
            out.append(round(optimizer.param_groups[0]["lr"], 6))
        return out

    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    for decay in ("constant", "linear", "cosine"):
        assert rates(2, warmup_steps=5, decay=decay) == pytest.approx([0.2, 0.4])
    assert rates(4, warmup_steps=0, decay="linear") == [0.8, 0.6, 0.4, 0.2]
    assert rates(5, warmup_steps=0, decay="linear", decay_steps=2) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert rates(3, warmup_steps=0, decay="cosine", min_lr=0.5)[-1] == pytest.approx(0.573223)


def test_norms_have_no_weight_decay(moe_path: Path, make_trainer: MakeTrainer) -> None:
    optimizer = make_trainer(moe_path, weight_decay=0.1).optimizer
    optimizer.schedule.step(1)
    decay = {p.dim(): set() for p in optimizer.model.parameters()}
    for group in optimizer.inner.param_groups:
        for parameter in optimizer.model.parameters():
            if any(getattr(parameter, "main_param", None) is master for master in group["params"]):
                decay[parameter.dim()].add(group["weight_decay"])
    assert decay == {1: {0.0}, 2: {0.1}, 3: {0.1}}


def test_rows_are_padded_as_fp8_products_want(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer, batch, widths = make_trainer(moe_path, "fp8"), random_batch(), set()
    expected = scored(trainer, batch)
    trainer.lowering = Lowering(row_multiple=16)
    trainer.model.register_forward_pre_hook(lambda _, inputs: widths.add(inputs[0].shape[1]))
    assert torch.equal(scored(trainer, batch), expected)
    assert {width % 16 for width in widths} == {0} and int(batch.lengths.max()) % 16


def test_an_entropy_has_the_gradient_of_the_whole_vocabulary(moe_path: Path, make_trainer: MakeTrainer) -> None:
    batch = random_batch(temperature=0.7)
    trainer = make_trainer(moe_path, dtype=torch.float32)
    trainer._pass(batch, Entropy(int(batch.loss_mask.sum())))
    model = reference(moe_path)
    logits = model(batch.tokens, attention_mask=batch.real_tokens().long()).logits[:, :-1] / 0.7
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    (-(entropy * batch.loss_mask[:, 1:]).sum() / batch.loss_mask.sum()).backward()
    ours, theirs = trainer.model.output_layer.weight.main_grad, model.lm_head.weight.grad
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_a_trainer_that_nobody_holds_is_gone(moe_path: Path, make_trainer: MakeTrainer) -> None:
    """Megatron's own hooks would keep model, buffers and process groups for as long as the process lasts."""
    trainer = make_trainer(moe_path)
    batch = random_batch(rows=4, longest=12)
    trainer.train_step(batch, cross_entropy(batch))
    model = weakref.ref(trainer.optimizer.model)
    del trainer
    gc.collect()
    assert model() is None


def test_training_leaves_what_was_padded_at_zero(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    source = write(tmp_path / "source", QWEN2, torch.bfloat16)
    padded(source, tmp_path / "padded", "MODEL", whole_blocks)
    trainer = make_trainer(tmp_path / "padded", lr=1e-2, weight_decay=0.1)
    for step in range(3):
        batch = random_batch(seed=step)
        trainer.train_step(batch, cross_entropy(batch))
    trainer.export_hf(tmp_path / "trained")
    unpadded(tmp_path / "trained", tmp_path / "back", "MODEL")
    torch.testing.assert_close(logits(tmp_path / "back"), logits(tmp_path / "trained"), rtol=0, atol=0.03)
    inside, grown = weights(tmp_path / "back"), weights(tmp_path / "trained")
    for name, each in grown.items():
        corner = tuple(slice(size) for size in inside[name].shape)
        assert torch.count_nonzero(each) == torch.count_nonzero(each[corner]), name
    assert not torch.equal(inside["model.norm.weight"], weights(source)["model.norm.weight"])
    grown["model.layers.1.mlp.up_proj.weight"][-1, 0] = 1e-3
    shutil.rmtree(tmp_path / "padded")
    shutil.copytree(tmp_path / "trained", tmp_path / "padded", ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(grown, tmp_path / "padded" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight: found '1 values that are not zero"):
        unpadded(tmp_path / "padded", tmp_path / "never", "MODEL")
    assert not (tmp_path / "never").exists()
