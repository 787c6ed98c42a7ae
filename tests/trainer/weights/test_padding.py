"""Training leaves the zeros of a padded model as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8rl.models.checkpoint.padding import padded, unpadded
from fp8rl.numerics.core.errors import UserError
from tests.support.batches import cross_entropy, random_batch
from tests.support.padded import QWEN2, logits, weights, whole_blocks, write
from tests.support.trainers import MakeTrainer

pytestmark = pytest.mark.slow


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
