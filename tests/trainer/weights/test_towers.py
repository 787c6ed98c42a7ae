"""Published checkpoints of Qwen3.5: the text is transformers', and what a run writes is such a checkpoint again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from fp8rl.models import read_model
from fp8rl.models.checkpoint.reading import check_stored, read_tensors
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import token_by_token, write_family
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import TinyModel
from tests.support.towers import with_tower
from tests.support.trainers import POW2, MakeTrainer, trainer_on

pytestmark = pytest.mark.slow

SHAPES = {
    "moe": TinyModel(hidden=256, heads=4, kv_heads=2, experts=8, family="qwen3_5_moe_text"),
    "dense": TinyModel(hidden=256, heads=4, kv_heads=2, intermediate=256, family="qwen3_5_text", tied=True),
}
each = pytest.mark.parametrize("name", SHAPES)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("towers")
    return {name: with_tower(write_family(folder / name, shape)) for name, shape in SHAPES.items()}


@each
def test_fp32_logits_are_those_of_transformers(name: str, paths: dict[str, Path], make_trainer: MakeTrainer) -> None:
    tokens = torch.randint(0, 100, (3, 70), generator=torch.Generator().manual_seed(1))  # none of a picture
    theirs = token_by_token(AutoModelForImageTextToText.from_pretrained(paths[name], dtype=torch.float32))
    assert type(theirs).__name__.endswith("ForConditionalGeneration")
    trainer = make_trainer(paths[name], dtype=torch.float32)
    with torch.no_grad():
        logits = trainer.model(tokens, position_ids=None, attention_mask=None)
        expected = theirs(tokens, use_cache=False).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@each
def test_a_written_model_is_the_published_one_again_to_the_bit(
    name: str, paths: dict[str, Path], tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    path, batch, said = paths[name], random_batch(2, 60), []
    check_stored(path, read_model(path), say=said.append)
    trainer = make_trainer(path, "fp8")
    trainer.weights.write(trainer.model, tmp_path / "before")
    stored, written = (all_of(folder) for folder in (path, tmp_path / "before"))
    assert written.keys() == stored.keys()
    different = [key for key in stored if not bits_equal(written[key], stored[key])]
    assert not different
    for file in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        assert (tmp_path / "before" / file).read_bytes() == (path / file).read_bytes()
    tower = [key for key in stored if key.startswith("model.visual.")]
    assert len(said) == 1 and f"tower for pictures ({len(tower)} tensors" in said[0] and len(tower) > 10

    trainer.train_step(batch, cross_entropy(batch))
    trainer.weights.write(trainer.model, tmp_path / "after")
    trained, exported = all_of(tmp_path / "after"), dict(trainer.export_weights())
    for key in stored:
        kept = key.startswith(("model.visual.", "mtp."))
        if "norm" not in key and ".experts." not in key:
            assert torch.equal(trained[key], stored[key]) == kept, key
    back = read_tensors(tmp_path / "after", exported)
    assert all(bits_equal(back[key], tensor) for key, tensor in exported.items())
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "after", dtype=torch.float32)
    held = model.state_dict()
    assert all(torch.equal(held[key], trained[key].float()) for key in trained if not key.startswith("mtp."))


def test_ranks_write_their_experts_into_one_tensor(paths: dict[str, Path], tmp_path: Path) -> None:
    run_on_ranks(TrainerSection(ep=2, dp=2), tmp_path / "ranks", partial(write, paths["moe"], tmp_path / "written"))
    stored, written = load_file(paths["moe"] / "model.safetensors"), all_of(tmp_path / "written")
    assert written.keys() == stored.keys()
    assert all(bits_equal(written[key], stored[key]) for key in stored)
    check_stored(tmp_path / "written", read_model(tmp_path / "written"))


def test_an_engine_gets_a_model_of_the_text_alone(paths: dict[str, Path], tmp_path: Path) -> None:
    convert_checkpoint(paths["moe"], tmp_path / "served", POW2)
    model, served = read_model(tmp_path / "served", served=True), all_of(tmp_path / "served")
    assert model.architecture is read_model(paths["moe"]).architecture and not model.sizes.tower
    assert {key.removesuffix("_scale_inv") for key in served} == model.tensors.rows.keys()
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert not {"text_config", "vision_config"} & config.keys()
    assert not (tmp_path / "served" / "preprocessor_config.json").exists()


def bits_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def all_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write(path: Path, out: Path, layout: Layout, config: TrainerSection) -> None:
    """Ranks write a model as they have read it."""
    trainer = trainer_on(layout, config, path)
    trainer.weights.write(trainer.model, out)
