"""The model: its weights against their file, rows that stand alone, on Triton's kernels, interpreted without a GPU, and
against a forward written from docs/exactness.md."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tests.support.interpreter  # noqa: F401
from examples.upcycle import upcycle
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.trainer.config import TrainerSection
from lab.bench.float64 import logprobs
from lab.bench.rounded import Rounded
from tests.support.batches import cross_entropy, random_batch
from tests.support.meta_model import built
from tests.support.models import write_model
from tests.support.padded import dense
from tests.support.trainers import POW2, MakeTrainer, scored


@pytest.mark.parametrize("mode", ["exact", "native"])
def test_parameters_are_on_the_gpu(mode: str, moe_path: Path, layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which is another device than the one that torch takes by default."""
    monkeypatch.setattr(torch.cuda, "current_device", torch.cuda.current_device)  # `built` takes its place
    parameters = dict(built(moe_path, TrainerSection(), NumericsConfig(mode=mode, spec=POW2)).named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.device.type != "meta"} == set()
    assert any("router" in name for name in parameters)


def test_an_exported_directory_has_every_file(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    out = tmp_path / "out"
    make_trainer(moe_path).export_hf(out)
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in moe_path.iterdir())
    assert (out / "config.json").read_text() == (moe_path / "config.json").read_text()
    stored, written = load_file(moe_path / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(stored[name], written[name]) for name in stored)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_the_number_of_k_slices_is_part_of_the_result(dense_path: Path, make_trainer: MakeTrainer) -> None:
    # In BF16: sums of FP8 products are so short that FP32 mostly adds them exactly, in any order.
    one, two = (scored(make_trainer(dense_path, "bf16", k_splits=splits), random_batch()) for splits in (1, 2))
    assert not torch.equal(one, two)
    torch.testing.assert_close(one, two, rtol=0, atol=0.5)
    with pytest.raises(UserError, match="trainer.packing"):
        make_trainer(dense_path, mode="native", packing=True)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter takes a millisecond for a tile and step: one layer, one head, four experts."""
    path = tmp_path_factory.mktemp("small") / "model"
    return write_model(path, layers=1, heads=2, kv_heads=1, hidden=128, experts=4)


KINDS = [("moe", "bf16"), ("moe", "fp8"), ("dense", "bf16"), ("dense", "fp8"), ("small", "fp8")]


@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_a_row_has_the_same_logprobs_alone_and_in_a_batch(kind, precision, models, small_path, make_trainer) -> None:
    """Of the small model by Triton's kernels."""
    small = kind == "small"
    trainer = make_trainer(small_path if small else models[kind], precision, micro_batch_tokens=4096)
    batch = random_batch(*((2, 12) if small else (10, 330)), temperature=0.7)
    with using("triton") if small else nullcontext():
        together = scored(trainer, batch)
        for row in {0, batch.rows // 2, batch.rows - 1}:
            length = int(batch.lengths[row])
            _, (alone,) = trainer.score(batch.select([row]))
            assert alone[1:].abs().min() > 0 and torch.equal(alone, together[row, :length])
            assert not together[row, length:].any()


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
