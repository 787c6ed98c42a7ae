"""The recording of the trainer's ops: complete, in order, and what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8rl.models import read_model
from fp8rl.models.trace import output
from fp8rl.trainer.op_trace import trace_ops
from tests.support.batches import random_batch
from tests.support.models import LAYERS, token_by_token
from tests.support.trainers import Models


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize("kind", ["moe", "dense", "linear"])
def test_a_recording_is_the_forward_of_transformers(kind: str, mode: str, models: Models, make_trainer: Any) -> None:
    trainer = make_trainer(models[kind], dtype=torch.float32, mode=mode)
    batch = random_batch(rows=3, longest=20, temperature=0.7)
    record = trace_ops(trainer, batch).tensors
    reference = token_by_token(AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32))
    rows = [
        reference(row[None, :n], output_hidden_states=True, use_cache=False)
        for row, n in zip(batch.tokens, batch.lengths.tolist())
    ]
    for site in read_model(models[kind]).forward.sites():
        assert len(output(record, site)) == int(batch.lengths.sum()), site
    for layer in range(LAYERS):
        stream = torch.cat([row.hidden_states[layer][0] for row in rows])
        torch.testing.assert_close(record[f"layers.{layer}.input_norm:out.residual"], stream, rtol=1e-3, atol=1e-4)
    logits = torch.cat([row.logits[0] for row in rows])
    found = record["lm_head:out.logits"]
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
    logprobs = (found.double() / 0.7).log_softmax(-1).gather(1, record["targets"][:, None]).squeeze(1)
    torch.testing.assert_close(record["logprobs:out.logprobs"].double(), logprobs, rtol=0, atol=1e-5)


def test_experts_and_log_probabilities_add_up_and_no_trace_is_left(moe_path: Path, make_trainer: Any) -> None:
    trainer, batch = make_trainer(moe_path, "fp8"), random_batch(rows=2, longest=30)
    trace = trace_ops(trainer, batch)
    record, length = trace.tensors, int(batch.lengths[0])
    assert torch.equal(record["logprobs:out.logprobs"][: length - 1], trainer.score(batch)[1][0, 1:length])
    # What the experts add up to, each rounded on its own.
    each, total = record["layers.1.experts:each"].float().sum(1), record["layers.1.experts:out.x"].float()
    assert 0 < (each - total).norm() / total.norm() < 0.01
    sizes, scaling = trainer.definition.sizes, {"the factor of the rope scaling": 1.0}
    assert trace.settings == {"rope_theta": sizes.rope_theta, "norm_eps": sizes.norm_eps} | scaling
    for module in trainer.model.modules():
        assert not module._forward_hooks and not {"gating", "routing", "_forward_impl"} & vars(module).keys()
