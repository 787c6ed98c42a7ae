"""Published forms: adapters in PEFT's, which it computes as we do; checkpoints of Qwen3.5, whose text is transformers'
and which a run writes again."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from fp8rl.models import read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.checkpoint.peft import BASE, CONFIG, TENSORS, read_adapter, read_config
from fp8rl.models.checkpoint.reading import check_stored, stored_files
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import token_by_token, write_family, write_model
from tests.support.padded import weights
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import TinyModel
from tests.support.towers import with_tower
from tests.support.trainers import POW2, MakeTrainer, scored, spread, trainer_on

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""PEFT 0.21 puts no adapters beside the dense MLP and the shared experts of a DeepSeek-V3, whose experts are fused."""


@pytest.fixture(scope="module")
def written(moe_path: Path, tmp_path_factory: pytest.TempPathFactory, make_trainer: MakeTrainer) -> Path:
    trainer = make_trainer(moe_path, "bf16", adapter=AdapterSection(rank=4))
    spread(trainer)
    trainer.export_adapter(path := tmp_path_factory.mktemp("peft") / "adapter")
    return path


@pytest.mark.parametrize(
    ("model", "changes"),
    [("moe", {}), ("moe", {"experts": "shared"}), ("latent", {"targets": LATENT})],
    ids=["per_expert", "shared", "latent"],
)
def test_peft_computes_what_the_trainer_does_in_fp32(model, changes, models, tmp_path, make_trainer) -> None:
    peft = pytest.importorskip("peft", reason="needs peft and accelerate, which nothing else here does")
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(models[model], "bf16", torch.float32, adapter=AdapterSection(rank=4, **changes))
    batch = random_batch(seed=0)
    before = scored(trainer, batch)[batch.loss_mask]
    spread(trainer, 0.1)
    trainer.export_adapter(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float32).eval()
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    ours = scored(trainer, batch)[batch.loss_mask]
    assert (ours - before).abs().mean() > 1
    with torch.no_grad():  # the padding behind a row changes nothing before it
        logprobs = adapted(input_ids=batch.tokens).logits[:, :-1].log_softmax(-1)
    theirs = logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0][batch.loss_mask[:, 1:]]
    assert (ours - theirs).abs().max() < 1e-4


def test_a_run_begins_with_an_adapter(written: Path, moe_path: Path, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    again = make_trainer(moe_path, "bf16", adapter=AdapterSection(rank=4, start=str(written)))
    again.export_adapter(tmp_path / "again")
    first, second = (load_file(path / TENSORS) for path in (written, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "again" / CONFIG).read_bytes() == (written / CONFIG).read_bytes()


def test_a_merged_checkpoint_is_the_sum(written, moe_path, tmp_path, make_trainer) -> None:
    convert_checkpoint(moe_path, tmp_path / "bf16", QuantSpec.preset("bf16"), adapter=written)
    convert_checkpoint(moe_path, tmp_path / "fp8", QuantSpec.preset("fp8_block_pow2"), adapter=written)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "after", QuantSpec.preset("fp8_block_pow2"))
    name = "model.layers.1.mlp.experts.5.up_proj"
    adapter, base, merged = (
        load_file(file)
        for file in (written / TENSORS, *(each / "model.safetensors" for each in (moe_path, tmp_path / "bf16")))
    )
    a, b = (adapter[f"base_model.model.{name}.lora_{letter}.weight"].double() for letter in "AB")
    expected = (base[f"{name}.weight"].double() + 8.0 * b @ a).float().bfloat16()
    assert (merged[f"{name}.weight"] != expected).sum() <= 2  # sums of another order
    assert not torch.equal(merged[f"{name}.weight"], base[f"{name}.weight"])
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])
    direct, later = (load_file(tmp_path / each / "model.safetensors") for each in ("fp8", "after"))
    assert direct.keys() == later.keys()
    assert all(torch.equal(direct[each].view(torch.uint8), later[each].view(torch.uint8)) for each in direct)


def changed(adapter: Path, change: str) -> None:
    if change == "unknown":
        tensors = load_file(adapter / TENSORS) | {"base_model.model.score.lora_A.weight": torch.zeros(4, 256)}
        save_file(tensors, adapter / TENSORS)
    elif change == "base":
        save_file(load_file(adapter / TENSORS), adapter / TENSORS, {BASE: "0" * 32})
    else:
        (adapter / CONFIG).write_text(json.dumps(json.loads((adapter / CONFIG).read_text()) | json.loads(change)))


@pytest.mark.parametrize(
    ("change", "experts", "message"),
    [('{"peft_type": "IA3"}', "per_expert", "peft_type='IA3'"), ('{"r": 8}', "per_expert", "of shape"),
     ("unknown", "per_expert", "score.lora_A.weight"), ("base", "per_expert", "digest"),
     ("{}", "shared", "experts with adapters of their own")],
)  # fmt: skip
def test_what_is_no_adapter_of_this_model_is_refused(change, experts, message, written, moe_path, tmp_path) -> None:
    shutil.copytree(written, tmp_path / "adapter")
    changed(tmp_path / "adapter", change)
    model = read_model(moe_path).adapted(AdapterSection(rank=4, experts=experts))
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path / "adapter", moe_path, model, "adapter.start")


def test_what_peft_wrote_itself_of_a_dense_model_is_read(tmp_path: Path) -> None:
    """Files as PEFT leaves them: without our metadata, with keys that we do not write."""
    path, adapter = write_model(tmp_path / "model", moe=False), tmp_path / "adapter"
    model, targets, prefix = read_model(path), ("q_proj", "v_proj"), "base_model.model."
    tensors = {}
    for row in model.tensors.rows.values():
        if row.name.split(".")[-2] in targets:
            name = prefix + row.name.removesuffix(".weight")
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, row.shape[1])
            tensors[f"{name}.lora_B.weight"] = torch.randn(row.shape[0], 8)
    adapter.mkdir()
    save_file(tensors, adapter / TENSORS)
    plain = {"alpha_pattern": {}, "bias": "none", "corda_config": None, "layers_to_transform": None}
    described = plain | {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]}
    (adapter / CONFIG).write_text(json.dumps(described))
    config = read_config(adapter, model, "adapter.start")
    assert (config.rank, config.alpha, set(config.targets), config.experts) == (8, 16.0, set(targets), "none")
    found = read_adapter(adapter, path, model.adapted(config), "adapter.start")
    assert {prefix + name for name in found} == tensors.keys()
    assert all(torch.equal(found[name.removeprefix(prefix)], tensor) for name, tensor in tensors.items())


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
def test_a_written_model_is_the_one_read(name, paths, tmp_path, make_trainer) -> None:
    path, batch, said = paths[name], random_batch(2, 60), []
    check_stored(path, read_model(path), say=said.append)
    trainer = make_trainer(path, "fp8")
    trainer.weights.write(trainer.model, tmp_path / "before")
    stored, written = (weights(folder) for folder in (path, tmp_path / "before"))
    assert written.keys() == stored.keys()
    different = [key for key in stored if not bits_equal(written[key], stored[key])]
    assert not different
    for file in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        assert (tmp_path / "before" / file).read_bytes() == (path / file).read_bytes()
    tower = [key for key in stored if key.startswith("model.visual.")]
    assert len(said) == 1 and f"tower for pictures ({len(tower)} tensors" in said[0] and len(tower) > 10
    trainer.train_step(batch, cross_entropy(batch))
    trainer.weights.write(trainer.model, tmp_path / "after")
    trained, exported = weights(tmp_path / "after"), dict(trainer.weights.share(trainer.model))
    for key in stored:
        kept = key.startswith(("model.visual.", "mtp."))
        if "norm" not in key and ".experts." not in key:
            assert torch.equal(trained[key], stored[key]) == kept, key
    files = stored_files(tmp_path / "after")
    back = {name: files.read(name) for name in exported}
    assert all(bits_equal(back[key], tensor) for key, tensor in exported.items())
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "after", dtype=torch.float32)
    held = model.state_dict()
    assert all(torch.equal(held[key], trained[key].float()) for key in trained if not key.startswith("mtp."))


def test_ranks_write_their_experts_into_one_tensor(paths: dict[str, Path], tmp_path: Path) -> None:
    run_on_ranks(TrainerSection(ep=2, dp=2), tmp_path / "ranks", partial(write, paths["moe"], tmp_path / "written"))
    stored, written = load_file(paths["moe"] / "model.safetensors"), weights(tmp_path / "written")
    assert written.keys() == stored.keys() and all(bits_equal(written[key], stored[key]) for key in stored)
    check_stored(tmp_path / "written", read_model(tmp_path / "written"))


def test_an_engine_gets_a_model_of_the_text_alone(paths: dict[str, Path], tmp_path: Path) -> None:
    convert_checkpoint(paths["moe"], tmp_path / "served", POW2)
    model, served = read_model(tmp_path / "served", served=True), weights(tmp_path / "served")
    assert model.architecture is read_model(paths["moe"]).architecture and not model.sizes.tower
    assert {key.removesuffix("_scale_inv") for key in served} == model.tensors.rows.keys()
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert not {"text_config", "vision_config"} & config.keys()
    assert not (tmp_path / "served" / "preprocessor_config.json").exists()


def bits_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def write(path: Path, out: Path, layout, config: TrainerSection) -> None:
    trainer = trainer_on(layout, config, path)
    trainer.weights.write(trainer.model, out)
