"""The recording of the trainer's ops: complete, in order, and what transformers computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from numerics.errors import UserError
from numerics.traced_ops import key, places, places_in
from tests.support.batches import random_batch
from tests.support.models import LAYERS
from trainer.op_trace import trace_ops


@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_recording_is_the_forward_of_transformers(kind: str, mode: str, request: Any, make_trainer: Any) -> None:
    path: Path = request.getfixturevalue(f"{kind}_path")
    trainer = make_trainer(path, dtype=torch.float32, mode=mode)
    batch = random_batch(rows=3, longest=20, temperature=0.7)
    record = trace_ops(trainer, batch).tensors
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = [reference(row[None, :n], output_hidden_states=True) for row, n in zip(batch.tokens, batch.lengths.tolist())]
    assert places_in(record) == places(LAYERS, moe=kind == "moe")
    for layer in range(LAYERS):
        stream = torch.cat([row.hidden_states[layer][0] for row in rows])
        torch.testing.assert_close(record[key((layer, "input_norm"), "out")][:, 1], stream, rtol=1e-3, atol=1e-4)
    logits = torch.cat([row.logits[0] for row in rows])
    torch.testing.assert_close(record["lm_head:out"], logits, rtol=1e-3, atol=1e-3)
    logprobs = (record["lm_head:out"].double() / 0.7).log_softmax(-1).gather(1, record["targets"][:, None]).squeeze(1)
    torch.testing.assert_close(record["logprobs:out"].double(), logprobs, rtol=0, atol=1e-5)


def test_each_op_takes_what_the_one_before_it_gave(moe_path: Path, make_trainer: Any) -> None:
    trainer = make_trainer(moe_path, "fp8")
    batch = random_batch(rows=2, longest=30)
    trace = trace_ops(trainer, batch)
    record = trace.tensors
    _, scored = trainer.score(batch)
    assert torch.equal(record["logprobs:out"][: int(batch.lengths[0]) - 1], scored[0, 1 : int(batch.lengths[0])])
    for giver, taker, name in (("qkv", "q_norm", "x"), ("attention", "o_proj", "x"), ("router", "topk", "logits")):
        given, taken = record[f"layers.1.{giver}:out"], record[f"layers.1.{taker}:{name}"]
        assert torch.equal(given.flatten(1)[:, : taken[0].numel()], taken.flatten(1))
    q, k = (record[f"layers.1.attention:{name}"] for name in "qk")
    assert torch.equal(record["layers.1.rope:out"], torch.cat((q, k), 1))
    x, residual = (record[f"layers.1.post_norm:{name}"] for name in ("x", "residual"))
    assert torch.equal(record["layers.1.post_norm:out"][:, 1], x + residual)
    # What the experts add up to, each rounded on its own.
    each, total = record["layers.1.experts:each"].float().sum(1), record["layers.1.experts:out"].float()
    assert 0 < (each - total).norm() / total.norm() < 0.01
    assert trace.settings == {"rope_theta": trainer.shape.rope_theta, "norm_eps": trainer.shape.norm_eps}


def test_a_recording_leaves_no_trace_in_the_model(moe_path: Path, make_trainer: Any) -> None:
    trainer = make_trainer(moe_path)
    trace_ops(trainer, random_batch(rows=1, longest=3))
    for module in trainer.model.modules():
        assert not module._forward_hooks
        assert not {"gating", "routing", "_forward_impl"} & vars(module).keys()


def test_several_ranks_are_refused() -> None:
    trainer = SimpleNamespace(config=SimpleNamespace(world_size=2))
    with pytest.raises(UserError, match="trainer: found '2 ranks', expected 1"):
        trace_ops(trainer, random_batch(rows=1, longest=3))
