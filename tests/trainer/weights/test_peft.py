"""Adapters in PEFT's format: what we write is what PEFT computes, and what we read is what was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8rl.models import read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.checkpoint.peft import BASE, CONFIG, TENSORS, read_adapter, read_config
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.batches import random_batch
from tests.support.models import write_model
from tests.support.trainers import MakeTrainer, Models, scored, spread

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""PEFT 0.21 puts no adapters beside the dense MLP and the shared experts of a DeepSeek-V3, whose experts are fused."""


@pytest.fixture(scope="module")
def written(moe_path: Path, tmp_path_factory: pytest.TempPathFactory, make_trainer: MakeTrainer) -> Path:
    """An adapter whose B is not zero, as a trainer writes it."""
    trainer = make_trainer(moe_path, "bf16", adapter=AdapterSection(rank=4))
    spread(trainer)
    trainer.export_adapter(path := tmp_path_factory.mktemp("peft") / "adapter")
    return path


@pytest.mark.parametrize(
    ("model", "changes"),
    [("moe", {}), ("moe", {"experts": "shared"}), ("latent", {"targets": LATENT})],
    ids=["per_expert", "shared", "latent"],
)
def test_peft_computes_what_the_trainer_does_in_fp32(
    model: str, changes: dict[str, Any], models: Models, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
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
    assert (ours - by_transformers(adapted, batch)).abs().max() < 1e-4


@torch.no_grad()
def by_transformers(model: Any, batch: TokenBatch) -> Tensor:
    """Log-probabilities of a batch's targets. The padding behind a row changes nothing before it."""
    logprobs = model(input_ids=batch.tokens).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0][batch.loss_mask[:, 1:]]


def test_a_run_begins_with_an_adapter(written: Path, moe_path: Path, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    again = make_trainer(moe_path, "bf16", adapter=AdapterSection(rank=4, start=str(written)))
    again.export_adapter(tmp_path / "again")
    first, second = (load_file(path / TENSORS) for path in (written, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "again" / CONFIG).read_bytes() == (written / CONFIG).read_bytes()


def test_a_merged_checkpoint_is_the_sum_and_is_quantized_like_any(
    written: Path, moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
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
    """Change what an adapter's directory says or holds."""
    if change == "unknown":
        tensors = load_file(adapter / TENSORS) | {"base_model.model.score.lora_A.weight": torch.zeros(4, 256)}
        save_file(tensors, adapter / TENSORS)
    elif change == "base":
        save_file(load_file(adapter / TENSORS), adapter / TENSORS, {BASE: "0" * 32})
    else:
        (adapter / CONFIG).write_text(json.dumps(json.loads((adapter / CONFIG).read_text()) | json.loads(change)))


@pytest.mark.parametrize(
    ("change", "experts", "message"),
    [
        ('{"use_dora": true}', "per_expert", "use_dora=True"),
        ('{"rank_pattern": {"q_proj": 8}}', "per_expert", "rank_pattern"),
        ('{"peft_type": "IA3"}', "per_expert", "peft_type='IA3'"),
        ('{"r": 8}', "per_expert", "of shape"),
        ("unknown", "per_expert", "score.lora_A.weight"),
        ("base", "per_expert", "digest"),
        ("{}", "shared", "experts with adapters of their own"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_refused(
    change: str, experts: str, message: str, written: Path, moe_path: Path, tmp_path: Path
) -> None:
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
