"""The trainer's ops against transformers': attention over FP8 keys and values, and each op of a recording."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp8rl.models import read_model
from fp8rl.trainer.op_trace import trace_ops
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import LAYERS, reference, write_model
from tests.support.trainers import MakeTrainer, Models, in_order, scored
from tests.support.trees import conversations

pytestmark = pytest.mark.slow

SCALED = {"kv": "fp8", "key_scale": 0.5, "value_scale": 0.0625}
TOO_SMALL = {"kv": "fp8", "key_scale": 2.0**-16, "value_scale": 2.0**-16}


@pytest.mark.parametrize("scales", [{"kv": "fp8"}, SCALED], ids=["one", "scaled"])
def test_log_probabilities_are_those_of_transformers_over_rounded_keys_and_values(
    scales: dict[str, Any], tmp_path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
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
    found = scored(make_trainer(path, dtype=torch.float32, kv=scales), batch)[:, 1:][batch.real_tokens()[:, 1:]]
    rounding = (expected - unrounded).abs().mean()
    assert rounding > 1e-3 and (found - expected).abs().mean() < 0.02 * rounding


@pytest.mark.parametrize("kind", ["moe", "latent", "linear"])
def test_rows_of_every_form_have_the_same_bits(kind: str, make_trainer: MakeTrainer, models: Models) -> None:
    batch, path, found = conversations(), models[kind], []
    for keys in ({}, {"packing": True}, {"prefix_sharing": True}, {"kv": None}):
        done = make_trainer(path, "fp8", **{"kv": SCALED} | keys).forward_backward(batch, cross_entropy(batch))
        found.append(in_order(done.rows, done.result.logprobs))
        assert done.result.metrics.get("train/kv_saturated") == (None if "kv" in keys else 0)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2]) and not torch.equal(found[2], found[3])
    live = make_trainer(path, "fp8", kv=SCALED)  # which falls back to BF16
    live.set_numerics(live.numerics.in_bf16())
    assert torch.equal(live.score(batch)[1], make_trainer(path).score(batch)[1])


@pytest.mark.parametrize("kind", ["moe", "latent"])
def test_saturated_numbers_are_counted_without_padding(kind: str, make_trainer: MakeTrainer, models: Models) -> None:
    """Each row by itself has no padding. Under scales that hold numbers up to 0.007: all but some."""
    batch, path = conversations(), models[kind]
    alone = make_trainer(path, "fp8", kv=TOO_SMALL)

    def of(trainer: Any, some) -> float:
        return trainer.forward_backward(some, cross_entropy(some)).result.metrics["train/kv_saturated"]

    tokens = batch.lengths.tolist()
    parts = [of(alone, batch.select([row])) for row in range(batch.rows)]
    expected = sum(part * count for part, count in zip(parts, tokens, strict=True)) / sum(tokens)
    assert 0.5 < expected < 1 and len({*tokens}) > 1
    ways: list[dict[str, Any]] = [{"packing": True}, {"recompute": "layer"}, {"micro_batch_tokens": 4 * batch.width}]
    for keys in ways if kind == "moe" else ways[:1]:
        trainer = make_trainer(path, "fp8", kv=TOO_SMALL, **keys)
        assert of(trainer, batch) == pytest.approx(expected, rel=1e-12), keys
    assert [of(alone, batch), of(alone, batch)] == pytest.approx([expected] * 2, rel=1e-12)


@pytest.mark.parametrize("kind", ["moe", "dense", "linear"])
def test_a_recording_is_the_forward_of_transformers(kind: str, models: Models, make_trainer: Any) -> None:
    trainer = make_trainer(models[kind], dtype=torch.float32)
    batch = random_batch(rows=3, longest=20, temperature=0.7)
    record = trace_ops(trainer, batch)
    theirs = reference(models[kind])
    rows = [
        theirs(row[None, :n], output_hidden_states=True, use_cache=False)
        for row, n in zip(batch.tokens, batch.lengths.tolist())
    ]
    for site in read_model(models[kind]).forward.sites():
        assert {len(record[site.key(name)]) for name in site.op.writes} == {int(batch.lengths.sum())}, site
    for layer in range(LAYERS):
        stream = torch.cat([row.hidden_states[layer][0] for row in rows])
        torch.testing.assert_close(record[f"layers.{layer}.input_norm:residual"], stream, rtol=1e-3, atol=1e-4)
    logits = torch.cat([row.logits[0] for row in rows])
    found = record["lm_head:logits"]
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
    logprobs = (found.double() / 0.7).log_softmax(-1).gather(1, record["targets"][:, None]).squeeze(1)
    torch.testing.assert_close(record["logprobs:logprobs"].double(), logprobs, rtol=0, atol=1e-5)


def test_experts_and_log_probabilities_add_up_and_no_trace_is_left(moe_path, make_trainer: Any) -> None:
    trainer, batch = make_trainer(moe_path, "fp8"), random_batch(rows=2, longest=30)
    record, length, sizes = trace_ops(trainer, batch), int(batch.lengths[0]), trainer.definition.sizes
    assert torch.equal(record["logprobs:logprobs"][: length - 1], trainer.score(batch)[1][0, 1:length])
    # What the experts add up to, each rounded on its own.
    each, total = record["layers.1.experts:each"].float().sum(1), record["layers.1.experts:x"].float()
    assert 0 < (each - total).norm() / total.norm() < 0.01
    assert (record["rope_theta"], record["norm_eps"]) == (sizes.rope_theta, sizes.norm_eps)
    assert record["the factor of the rope scaling"] == 1.0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())
