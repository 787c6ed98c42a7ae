"""Attention of the trainer over FP8 keys and values: transformers' over the same numbers, one layout like another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.batches import cross_entropy
from tests.support.models import write_model
from tests.support.ranks import run_on_ranks
from tests.support.trainers import MakeTrainer
from tests.support.trees import conversations

pytestmark = pytest.mark.slow

SCALED = {"kv": "fp8", "key_scale": 0.5, "value_scale": 0.0625}
TOO_SMALL = {"kv": "fp8", "key_scale": 2.0**-16, "value_scale": 2.0**-16}


@pytest.mark.parametrize("scales", [{"kv": "fp8"}, SCALED], ids=["one", "scaled"])
def test_log_probabilities_are_those_of_transformers_over_rounded_keys_and_values(
    scales: dict[str, Any], tmp_path: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP32, so that nothing else is rounded, by torch's own cast to E4M3."""
    batch, path = replace(conversations(), temperature=1.0), write_model(tmp_path / "moe", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    attend = qwen3_moe.eager_attention_forward

    def logprobs() -> Tensor:
        with torch.no_grad():
            logits = reference(batch.tokens, attention_mask=batch.real_tokens().long()).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, batch.tokens[:, 1:, None])[..., 0][batch.real_tokens()[:, 1:]]

    def over_rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = (
            (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
            for x, scale in ((key, scales.get("key_scale", 1.0)), (value, scales.get("value_scale", 1.0)))
        )
        return attend(module, query, key, value, *args, **kwargs)

    unrounded = logprobs()
    monkeypatch.setattr(qwen3_moe, "eager_attention_forward", over_rounded)
    expected = logprobs()
    rows, found = make_trainer(path, dtype=torch.float32, kv=scales).score(batch)
    found = found[torch.tensor(rows).argsort()][:, 1:][batch.real_tokens()[:, 1:]]
    rounding = (expected - unrounded).abs().mean()
    assert rounding > 1e-3 and (found - expected).abs().mean() < 0.02 * rounding


@pytest.mark.parametrize("path", ["moe_path", "latent_path", "linear_path"])
def test_rows_padded_end_to_end_and_in_trees_have_the_same_bits(
    path: str, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    batch, folder, found = conversations(), request.getfixturevalue(path), []
    for keys in ({}, {"packing": True}, {"prefix_sharing": True}):
        trainer = make_trainer(folder, "fp8", kv=SCALED, **keys)
        done = trainer.forward_backward(batch, cross_entropy(batch))
        found.append(done.result.logprobs[torch.tensor(done.rows).argsort()])
        assert done.result.metrics["train/kv_saturated"] == 0
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    plain = make_trainer(folder, "fp8").forward_backward(batch, cross_entropy(batch))
    assert not torch.equal(plain.result.logprobs[torch.tensor(plain.rows).argsort()], found[0])
    assert "train/kv_saturated" not in plain.result.metrics


@pytest.mark.parametrize("path", ["moe_path", "latent_path"])
def test_numbers_beyond_the_range_are_counted_whatever_padding_there_is(
    path: str, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    """Each row by itself has no padding. Under scales that hold numbers up to 0.007: all but some."""
    batch, folder = conversations(), request.getfixturevalue(path)
    alone = make_trainer(folder, "fp8", kv=TOO_SMALL)

    def of(trainer: Any, some: TokenBatch) -> float:
        return trainer.forward_backward(some, cross_entropy(some)).result.metrics["train/kv_saturated"]

    tokens = batch.lengths.tolist()
    parts = [of(alone, batch.select([row])) for row in range(batch.rows)]
    expected = sum(part * count for part, count in zip(parts, tokens, strict=True)) / sum(tokens)
    assert 0.5 < expected < 1 and len({*tokens}) > 1
    layouts = ({}, {"packing": True}, {"recompute": "layer"}, {"micro_batch_tokens": 4 * batch.width})
    for keys in layouts:
        trainer = make_trainer(folder, "fp8", kv=TOO_SMALL, **keys)
        assert [of(trainer, batch), of(trainer, batch)] == pytest.approx([expected] * 2, rel=1e-12), keys


def test_a_live_model_falls_back_to_bf16(moe_path: Path, make_trainer: MakeTrainer) -> None:
    batch = conversations()
    plain, trainer = make_trainer(moe_path), make_trainer(moe_path, "fp8", kv=SCALED)
    rounded = trainer.score(batch)[1]
    trainer.set_numerics(trainer.numerics.in_bf16())
    assert torch.equal(trainer.score(batch)[1], plain.score(batch)[1]) and not torch.equal(
        rounded, plain.score(batch)[1]
    )


def of_stage(path: Path, layout: Layout, config: TrainerSection) -> float:
    from fp8rl.trainer.trainer import Trainer

    batch, numerics = conversations(), NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"), **TOO_SMALL)
    keys = {"seed": 0, "total_steps": 9, "max_sequence_length": batch.width}
    done = Trainer(path, config, numerics, layout, **keys).forward_backward(batch, cross_entropy(batch))
    return done.result.metrics["train/kv_saturated"]


def test_stages_without_keys_count_along(linear_path: Path, tmp_path: Path) -> None:
    """Of four layers the last alone has keys."""
    found = run_on_ranks(TrainerSection(pp=2, packing=True), tmp_path, partial(of_stage, linear_path))
    assert found[0] == found[1] and 0.5 < found[0] < 1
