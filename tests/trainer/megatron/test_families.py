"""Architectures beside Qwen3, from a tiny model each: transformers' logits, every tensor there and back, both modes."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8rl.models import read_model, read_shape
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.numerics.core.errors import UserError
from fp8rl.trainer.checkpoint.checkpoint import JOINED
from fp8rl.trainer.checkpoint.files import read_about
from fp8rl.trainer.config import TrainerSection
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import reference, write_family
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import TinyModel
from tests.support.trainers import MakeTrainer, save_checkpoint, scored, trainer_on

pytestmark = pytest.mark.slow

WIDE = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 256}
FAMILIES = {
    "qwen3_moe": TinyModel(hidden=256, heads=4, kv_heads=2),
    "qwen3": TinyModel(hidden=256, heads=4, kv_heads=2, intermediate=256, experts=0),
    "qwen2": TinyModel(hidden=256, heads=4, kv_heads=2, intermediate=256, family="qwen2"),
    "qwen2-tied": TinyModel(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=256, family="qwen2", tied=True),
    "glm4_moe": TinyModel(layers=3, **WIDE, experts=8, top_k=3, family="glm4_moe"),
    "deepseek_v3": TinyModel(layers=3, hidden=256, heads=4, experts=8, top_k=3, family="deepseek_v3", yarn=True),
    "moonlight": TinyModel(layers=2, hidden=256, heads=2, family="deepseek_v3", groups=1, q_rank=0),
    "glm4_moe_lite": TinyModel(layers=2, hidden=256, heads=2, family="glm4_moe_lite", groups=1),
    "deepseek_v32": TinyModel(layers=2, hidden=256, heads=2, family="deepseek_v32", yarn=True),
    "glm_moe_dsa": TinyModel(layers=3, hidden=256, heads=2, family="glm_moe_dsa", groups=1),
    "mixtral": TinyModel(hidden=256, heads=2, kv_heads=2, family="mixtral"),
    "llama": TinyModel(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=256, family="llama", tied=True),
    "mistral": TinyModel(hidden=256, heads=2, family="mistral"),
    "qwen3_next": TinyModel(hidden=256, heads=4, kv_heads=2, experts=8, top_k=3, family="qwen3_next"),
    "qwen3_5_moe": TinyModel(hidden=256, heads=4, kv_heads=2, experts=8, family="qwen3_5_moe_text"),
    "qwen3_5": TinyModel(hidden=256, heads=4, kv_heads=2, intermediate=256, family="qwen3_5_text", tied=True),
    "olmoe": TinyModel(hidden=256, heads=2, kv_heads=2, experts=16, top_k=8, family="olmoe"),
}
LINEAR = ("qwen3_next", "qwen3_5_moe", "qwen3_5")
LIKE_OTHERS = ("qwen3", "qwen2-tied", "moonlight", "glm4_moe_lite", "deepseek_v32", "mistral", "mixtral", "qwen3_5")
"""Their ops are those of another in sizes or names."""
each_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def write(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    path = folder / f"{name} {dtype}"
    return path if path.is_dir() else write_family(path, FAMILIES[name], dtype)


def test_every_architecture_is_compared_with_transformers() -> None:
    assert {shape.family for shape in FAMILIES.values()} == set(TinyModel.families())


APART = {"qwen3": 1e-5, "qwen3_moe": 1e-5}


def assert_logits(path: Path, trainer: Any, apart: float) -> Any:
    """The trainer's logits in FP32 are those of transformers, whose indexers choose every key. Return its model."""
    tokens = torch.randint(0, 128, (3, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = trainer.model(tokens, position_ids=None, attention_mask=None)
        model = reference(path)
        expected = choosing(model, tokens.shape[1])(tokens, use_cache=False).logits
        fewer = choosing(model, tokens.shape[1] - 1)(tokens, use_cache=False).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=apart)
    assert torch.equal(fewer[:, :-1], expected[:, :-1])
    assert torch.equal(fewer, expected) != any(map(trainer.definition.sizes.keeps, model.state_dict()))
    return model


@each_family
def test_fp32_logits_and_gradients_are_those_of_transformers(
    name: str, folder: Path, make_trainer: MakeTrainer
) -> None:
    path = write(folder, name, torch.float32)
    trainer = make_trainer(path, dtype=torch.float32)
    model = assert_logits(path, trainer, APART.get(name, 2e-5))
    if name in LEARNING:
        assert_gradients(path, trainer, model, name)


LEARNING = ("qwen3_moe", "qwen2", "llama", "olmoe", "mixtral", "glm4_moe", "deepseek_v3", "moonlight", *LINEAR)
"""Families whose gradients are compared, too."""


def assert_gradients(path: Path, trainer: Any, model: Any, name: str) -> None:
    batch = random_batch()
    real = batch.real_tokens().long()
    logprobs = model(batch.tokens, attention_mask=real, use_cache=False).logits.log_softmax(-1)
    chosen = logprobs[:, :-1].gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    (-(chosen * batch.loss_mask[:, 1:]).sum() / batch.loss_mask.sum()).backward()
    table, compared = read_model(path).tensors, set()
    found = {key: parameter.grad for key, parameter in model.named_parameters()}
    if name == "mixtral":  # whose MLP transformers calls otherwise than its checkpoints do
        found = {key.replace(".mlp.", ".block_sparse_moe."): gradient for key, gradient in found.items()}
    for parameter, gradient in gradients(trainer).items():
        rows = table.in_megatron[parameter]
        for row, part in zip(rows, table.split(gradient, rows), strict=True):
            key, expected = row.name, found.get(row.name)
            if row.expert is not None:  # transformers holds a layer's experts together, gate and up in one
                down = row.kind.endswith("down_proj")
                key = f"{row.name.partition('.experts.')[0]}.experts.{'down_proj' if down else 'gate_up_proj'}"
                expected = found[key][row.expert]
                expected = expected if down else expected.chunk(2)[row.kind.endswith("up_proj")]
            torch.testing.assert_close(part, expected, rtol=1e-3, atol=1e-6)
            compared.add(key)
    assert compared == found.keys()


ONE, PLAIN = {"num_experts_per_tok": 1}, {"norm_topk_prob": False}
ROUTERS = [(name, changes) for name in ("qwen3_moe", "glm4_moe") for changes in (PLAIN, ONE, ONE | PLAIN)]
FORMS = [(mode, *form) for mode in ("exact", "native") for form in [*ROUTERS, ("qwen3", {"tie_word_embeddings": True})]]
"""Those of `FAMILIES` are compared in exact mode above."""


@pytest.mark.parametrize(("mode", "name", "changes"), [*FORMS, *(("native", each, {}) for each in APART)], ids=str)
def test_routers_of_every_form_equal_transformers_in_both_modes(mode, name, changes, folder, tmp_path, make_trainer):
    path = tmp_path / "model"
    shutil.copytree(write(folder, name, torch.float32), path)
    config = json.loads((path / "config.json").read_text()) | changes
    config |= {"routed_scaling_factor": 2.5} if name == "glm4_moe" else {}
    (path / "config.json").write_text(json.dumps(config))
    if config["tie_word_embeddings"]:
        stored = load_file(path / "model.safetensors")
        del stored["lm_head.weight"]
        save_file(stored, path / "model.safetensors", {"format": "pt"})
    assert_logits(
        path, make_trainer(path, dtype=torch.float32, mode=mode), APART.get(name, 2e-5) if mode == "exact" else 1e-4
    )


def test_megatrons_rotation_has_frequencies_of_a_lengthened_context(folder: Path, make_trainer: MakeTrainer) -> None:
    path, tokens = write(folder, "llama", torch.float32), torch.arange(8, 78)[None]
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool).triu(1)
    trainer = make_trainer(path, dtype=torch.float32, mode="native")
    with torch.no_grad():
        logits = trainer.model(tokens, position_ids=None, attention_mask=mask)
        torch.testing.assert_close(logits, reference(path)(tokens).logits, rtol=0, atol=2e-5)


def choosing(model: Any, keys: int) -> Any:
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = keys
    return model


@each_family
def test_every_tensor_is_saved_and_loaded(name: str, folder: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    path, batch = write(folder, name), random_batch(2, 60)
    trained, fresh = make_trainer(path, "fp8"), make_trainer(path, "fp8")
    stored, exported = load_file(path / "model.safetensors"), dict(fresh.weights.share(fresh.model))
    stored = {key: tensor for key, tensor in stored.items() if not fresh.definition.sizes.keeps(key)}
    assert exported.keys() == stored.keys() == read_model(path).tensors.rows.keys()
    assert all(torch.equal(exported[key].float(), tensor.float()) for key, tensor in stored.items())
    assert read_shape(path).parameters == sum(tensor.numel() for tensor in stored.values())
    trained.train_step(batch, cross_entropy(batch))
    for buffer_name, buffer in trained.model.named_buffers():  # which no optimizer trains
        if buffer_name.endswith("expert_bias"):
            buffer += 0.5
    save_checkpoint(trained, tmp_path / "checkpoint", {})
    assert read_about(tmp_path / "checkpoint").extra.get(JOINED, 1) == trained.definition.sizes.joined
    fresh.load(tmp_path / "checkpoint")
    brought = dict(fresh.weights.share(fresh.model))
    assert all(torch.equal(tensor, brought[key]) for key, tensor in trained.weights.share(trained.model))
    assert not any(
        torch.equal(stored[key].float(), brought[key].float()) for key in stored if not re.search("experts|norm", key)
    )


@pytest.mark.parametrize("name", [each for each in FAMILIES if each not in LIKE_OTHERS])
def test_native_mode_is_exact_mode_but_for_rounding_packed(name: str, folder: Path, make_trainer: MakeTrainer) -> None:
    path, batch = write(folder, name), random_batch(2, 60)

    def scores(precision: str, **changes: Any) -> Tensor:
        return scored(make_trainer(path, precision, **changes), batch)

    for precision, apart in (("bf16", 0.05), ("fp8", 0.25)):  # native mode quantizes latents, too
        exact = scores(precision)
        difference = (exact - scores(precision, mode="native")).abs()
        assert 0 < difference.max() and difference.mean() < apart, (precision, difference)
    assert torch.equal(exact, scores("fp8", packing=True))


def test_draft_layers_and_indexers_are_kept_as_they_are(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    path, drafted = write_family(tmp_path / "model", FAMILIES["glm_moe_dsa"]), "model.layers.3.eh_proj.weight"
    config, stored = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    stored[drafted] = torch.randn(256, 512).bfloat16()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{drafted}: found 'a tensor of shape"):
        check_stored(path, read_model(path))
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    check_stored(path, read_model(path))
    trainer = make_trainer(path, "fp8")
    kept = stored.keys() - dict(trainer.weights.share(trainer.model)).keys()
    assert kept == {name for name in stored if ".indexer." in name} | {drafted} and len(kept) == 11
    trainer.weights.write(trainer.model, tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)


def test_vectors_gradients_on_two_ranks_are_as_on_one(folder: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """Biases and norms, which ranks share in ways of their own."""
    names = ("qwen2", "olmoe", "glm4_moe", "deepseek_v3", "qwen3_next")
    paths = {name: write(folder, name, torch.float32) for name in names}
    ranks = run_on_ranks(TrainerSection(lr=1e-3, tp=2), tmp_path / "ranks", partial(gradients_of_all, paths))
    for name, path in paths.items():
        for parameter, gradient in gradients(make_trainer(path, dtype=torch.float32)).items():
            if gradient.dim() == 1:
                parts = [rank[name][parameter] for rank in ranks]
                whole = torch.cat(parts) if len(parts[0]) < len(gradient) else parts[0]
                torch.testing.assert_close(whole, gradient, rtol=1e-3, atol=1e-6)


def gradients_of_all(paths: dict[str, Path], layout, config: TrainerSection) -> dict[str, dict[str, Tensor]]:
    made = {name: trainer_on(layout, config, path, "bf16", dtype=torch.float32) for name, path in paths.items()}
    return {name: gradients(trainer) for name, trainer in made.items()}


def gradients(trainer: Any) -> dict[str, Tensor]:
    from fp8rl.trainer.modules.weights import matrices

    batch = random_batch()
    trainer._pass(batch, cross_entropy(batch))
    named = trainer.model.named_parameters()
    return {each: grad.clone() for name, parameter in named for each, grad in matrices(name, parameter.main_grad)}
