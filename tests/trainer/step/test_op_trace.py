"""The recording of the trainer's ops: complete, in order, and what transformers computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp8rl.models import read_model
from fp8rl.models.trace import output
from fp8rl.numerics.core.errors import UserError
from fp8rl.trainer.op_trace import trace_ops
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.batches import random_batch
from tests.support.models import LAYERS, token_by_token


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize("kind", ["moe", "dense", "linear"])
def test_a_recording_is_the_forward_of_transformers(kind: str, mode: str, request: Any, make_trainer: Any) -> None:
    path: Path = request.getfixturevalue(f"{kind}_path")
    trainer = make_trainer(path, dtype=torch.float32, mode=mode)
    batch = random_batch(rows=3, longest=20, temperature=0.7)
    record = trace_ops(trainer, batch).tensors
    reference = token_by_token(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    rows = [
        reference(row[None, :n], output_hidden_states=True, use_cache=False)
        for row, n in zip(batch.tokens, batch.lengths.tolist())
    ]
    for site in read_model(path).forward.sites():
        assert len(output(record, site)) == int(batch.lengths.sum()), site
    for layer in range(LAYERS):
        stream = torch.cat([row.hidden_states[layer][0] for row in rows])
        torch.testing.assert_close(record[f"layers.{layer}.input_norm:out.residual"], stream, rtol=1e-3, atol=1e-4)
    logits = torch.cat([row.logits[0] for row in rows])
    found = record["lm_head:out.logits"]
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
    logprobs = (found.double() / 0.7).log_softmax(-1).gather(1, record["targets"][:, None]).squeeze(1)
    torch.testing.assert_close(record["logprobs:out.logprobs"].double(), logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_what_an_op_reads_is_what_its_module_was_given(kind: str, request: Any, make_trainer: Any) -> None:
    """The recording says what flows by name; Megatron's modules are asked apart from it."""
    trainer = make_trainer(request.getfixturevalue(f"{kind}_path"), "fp8")
    batch = random_batch(rows=1, longest=30)
    length = int(batch.lengths[0])
    record = trace_ops(trainer, batch).tensors
    given = inputs_of_modules(trainer, batch, length)
    read = {
        "input_layernorm residual": record["layers.1.input_norm:out.residual"],
        "q_layernorm": record["layers.1.q_norm:in.q"],
        "k_layernorm": record["layers.1.k_norm:in.k"],
        "core_attention": record["layers.1.rope:in.q"],
        "linear_proj": record["layers.1.o_proj:in.x"],
        "output_layer": record["lm_head:in.x"],
    }
    if kind == "moe":
        read |= {"router": record["layers.1.router:in.x"], "mlp": record["layers.1.experts:in.x"]}
    else:
        read |= {"linear_fc2": record["layers.1.down:in.x"]}
    for name, tensor in read.items():
        assert torch.equal(given[name].reshape(tensor.shape), tensor), name
    residual, x = record["layers.1.post_norm:in.residual"], record["layers.1.post_norm:in.x"]
    assert torch.equal(record["layers.1.post_norm:out.residual"], x + residual)


def inputs_of_modules(trainer: Any, batch: TokenBatch, length: int) -> dict[str, Tensor]:
    """The first argument of modules of layer 1, and of the output projection."""
    layer, found = trainer.model.decoder.layers[1], {}
    modules = {
        "input_layernorm residual": layer.self_attention.linear_qkv,
        "q_layernorm": layer.self_attention.q_layernorm,
        "k_layernorm": layer.self_attention.k_layernorm,
        "core_attention": layer.self_attention.core_attention,
        "linear_proj": layer.self_attention.linear_proj,
        "mlp": layer.mlp,
        "router": getattr(layer.mlp, "router", None),
        "linear_fc2": getattr(layer.mlp, "linear_fc2", None),
        "output_layer": trainer.model.output_layer,
    }

    def keep(name: str) -> Any:
        return lambda _, given: found.update({name: given[0].detach().clone()})

    hooks = [module.register_forward_pre_hook(keep(name)) for name, module in modules.items() if module is not None]
    with torch.no_grad():
        trainer.model(batch.tokens[:, :length], position_ids=None, attention_mask=None)
    for hook in hooks:
        hook.remove()
    return found


def test_experts_and_log_probabilities_add_up(moe_path: Path, make_trainer: Any) -> None:
    trainer = make_trainer(moe_path, "fp8")
    batch = random_batch(rows=2, longest=30)
    trace = trace_ops(trainer, batch)
    record, length = trace.tensors, int(batch.lengths[0])
    _, scored = trainer.score(batch)
    assert torch.equal(record["logprobs:out.logprobs"][: length - 1], scored[0, 1:length])
    # What the experts add up to, each rounded on its own.
    each, total = record["layers.1.experts:each"].float().sum(1), record["layers.1.experts:out.x"].float()
    assert 0 < (each - total).norm() / total.norm() < 0.01
    sizes = trainer.definition.sizes
    scaling = {"the factor of the rope scaling": 1.0}
    assert trace.settings == {"rope_theta": sizes.rope_theta, "norm_eps": sizes.norm_eps} | scaling


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
