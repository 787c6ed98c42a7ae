"""The model against transformers, its weights against their file, and the row-invariance of its log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron.lowering import Lowering
from fp8rl.trainer.modules.precision import Precision
from tests.support.batches import random_batch
from tests.support.models import LENGTH, VOCAB, reference, write_model
from tests.support.trainers import MakeTrainer

KINDS: dict[str, dict[str, Any]] = {
    "moe": {},
    "moe_unnormalised": {"norm_topk_prob": False},
    "moe_of_one": {"num_experts_per_tok": 1},
    "moe_of_one_unnormalised": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "dense": {"moe": False},
    "dense_tied": {"moe": False, "tie_word_embeddings": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "apart"), [("exact", 1e-5), ("native", 1e-4)])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_logits_equal_transformers(
    kind: str, mode: str, apart: float, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    path = write_model(tmp_path / "m", dtype=torch.float32, **KINDS[kind])
    trainer = make_trainer(path, dtype=torch.float32, mode=mode)
    tokens = torch.randint(0, VOCAB, (3, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = trainer.model(tokens, position_ids=None, attention_mask=None)
        expected = reference(path)(tokens).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=apart)


@pytest.mark.parametrize("mode", ["exact", "native"])
def test_every_parameter_is_made_where_the_model_runs(
    mode: str, moe_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which is another device than the one that torch takes by default."""
    from fp8rl.trainer.megatron.model import build_model

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    numerics, definition = NumericsConfig(mode=mode, spec=QuantSpec.preset("fp8_block_pow2")), read_model(moe_path)
    precision = Precision(numerics, WeightCache(), definition.sizes.layers)
    model = build_model(definition, TrainerSection(), precision, Lowering(), LENGTH)
    parameters = dict(model.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.device.type != "meta"} == set()
    assert any("router" in name for name in parameters)


def test_exported_directory_has_the_weights_and_the_other_files(
    moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    (moe_path / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    make_trainer(moe_path).export_hf(out)
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in moe_path.iterdir())
    assert (out / "config.json").read_text() == (moe_path / "config.json").read_text()
    stored, written = load_file(moe_path / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(stored[name], written[name]) for name in stored)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("moe", [True, False])
def test_a_row_alone_and_in_a_batch_has_the_same_logprobs(
    precision: str, moe: bool, moe_path: Path, dense_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(moe_path if moe else dense_path, precision, micro_batch_tokens=4096)
    batch = random_batch(rows=10, longest=330, temperature=0.7)
    _, together = _ordered(trainer.score(batch))
    for row in (0, 4, 9):
        length = int(batch.lengths[row])
        _, alone = trainer.score(batch.select([row]))
        assert alone[0, 1:].abs().min() > 0
        assert torch.equal(alone[0], together[row, :length])
        assert not together[row, length:].any()


def test_fp8_differs_from_bf16(moe_path: Path, make_trainer: MakeTrainer) -> None:
    batch = random_batch()
    scores = [_ordered(make_trainer(moe_path, precision).score(batch))[1] for precision in ("bf16", "fp8")]
    assert (scores[0] - scores[1]).abs().mean() > 1e-3


def test_the_number_of_k_slices_is_part_of_the_result(dense_path: Path, make_trainer: MakeTrainer) -> None:
    # In BF16: sums of FP8 products are so short that FP32 mostly adds them exactly, in any order.
    batch = random_batch()
    scores = [make_trainer(dense_path, "bf16", k_splits=splits).score(batch)[1] for splits in (1, 2)]
    assert not torch.equal(scores[0], scores[1])
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=0.5)


def test_tensor_parallelism_with_other_k_splits_is_refused(moe_path: Path, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"numerics\.k_splits: found 1, expected trainer\.tp=2"):
        make_trainer(moe_path, tp=2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"head_dim": 96}, "head_dim"),
        ({"moe_intermediate_size": 192}, "moe_intermediate_size"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name(
    changes: dict, named: str, moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    config = json.loads((moe_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=named):
        make_trainer(tmp_path, "fp8")


def test_a_directory_without_weights_is_refused(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        make_trainer(tmp_path)
    (tmp_path / "config.json").write_text((moe_path / "config.json").read_text())
    with pytest.raises(UserError, match="safetensors"):
        make_trainer(tmp_path)


def _ordered(scored: tuple[list[int], torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    rows, logprobs = scored
    return sorted(rows), logprobs[torch.tensor(rows).argsort()]
