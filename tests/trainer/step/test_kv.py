"""Attention of the trainer over FP8 keys and values: transformers' over the same numbers, one layout like another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.batches import cross_entropy
from tests.support.models import write_model
from tests.support.trainers import MakeTrainer
from tests.support.trees import conversations

pytestmark = pytest.mark.slow

SCALED = {"kv": "fp8", "key_scale": 0.5, "value_scale": 0.0625}


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


def test_numbers_beyond_the_range_are_counted(moe_path: Path, make_trainer: MakeTrainer) -> None:
    """Under scales of 2^-16, which hold numbers up to 0.007: all but some."""
    batch, kv = conversations(), {"kv": "fp8", "key_scale": 2.0**-16, "value_scale": 2.0**-16}
    trainer = make_trainer(moe_path, "fp8", kv=kv)
    for _ in range(2):
        found = trainer.forward_backward(batch, cross_entropy(batch)).result.metrics["train/kv_saturated"]
        assert 0.5 < found < 1
