"""A new family of ops is one file, and edits none: it loads, syncs, traces, is planned and watched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp8rl.diagnose.doctor.formats import differences_of
from fp8rl.diagnose.doctor.watch import watch_step
from fp8rl.diagnose.explain.compare import ask_engine
from fp8rl.diagnose.explain.differences import op_differences
from fp8rl.models import architecture, read_shape, register
from fp8rl.models.architectures import qwen3_moe
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.budget.job import job_of
from fp8rl.rl.experiment.budget.memory import cache_bytes, engine_memory
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.types import SamplingParams
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.served import convert_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport
from tests.support.batches import batch_of_answers, cross_entropy, random_batch
from tests.support.experiments import experiment
from tests.support.made_up.definition import ARCHITECTURE, EXPERTS, GATED, PROJECTED
from tests.support.paths import ROOT
from tests.support.rig import make_engine
from tests.support.syncs import push
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.trainers import trainer_on

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("warm_engines")]

SHAPE = TinyModel(layers=2, hidden=256, heads=4, kv_heads=2, experts=4)
FILE = str(ROOT / "tests/support/made_up/definition.py")
NUMERICS = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
CONFIG = TrainerSection(lr=1e-3, warmup_steps=0)
OUT_NORM = "model.layers.{}.self_attn.out_norm.weight"
GATES = "model.layers.{}.self_attn.head_gates.weight"


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "_known", {})
        register(ARCHITECTURE)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE whose experts are called specialists, with gates for its heads and further norms."""
    path = tmp_path_factory.mktemp("made_up") / "model"
    write_tiny_model(path, SHAPE)
    config = json.loads((path / "config.json").read_text())
    own = {PROJECTED: SHAPE.kv_heads, "num_key_value_heads": SHAPE.heads}
    (path / "config.json").write_text(json.dumps(config | own | {"architectures": [ARCHITECTURE.name]}))
    file, draw = path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = {name.replace(".experts.", f".{EXPERTS}."): 4 * tensor for name, tensor in load_file(file).items()}
    for layer in range(SHAPE.layers):
        tensors[OUT_NORM.format(layer)] = (1 + 0.3 * torch.randn(SHAPE.hidden, generator=draw)).bfloat16()
        tensors[GATES.format(layer)] = (0.2 * torch.randn(SHAPE.heads, SHAPE.hidden, generator=draw)).bfloat16()
    save_file(tensors, file, {"format": "pt"})
    return path


def test_the_trainer_computes_what_transformers_does(model: Path, layout: Layout, tmp_path: Path) -> None:
    """With the gates and norms put into its Qwen3-MoE by hand."""
    tensors = load_file(model / "model.safetensors")
    write_tiny_model(tmp_path / "plain", SHAPE)
    own = {form.format(layer) for form in (OUT_NORM, GATES) for layer in range(SHAPE.layers)}
    stock = {name.replace(f".{EXPERTS}.", ".experts."): tensors[name] for name in tensors.keys() - own}
    save_file(stock, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    for index, layer in enumerate(reference.model.layers):
        add_by_hand(layer.self_attn, *(tensors[form.format(index)].float() for form in (GATES, OUT_NORM)))
    plain = {"spec": QuantSpec.preset("bf16"), "rollout": "bf16"}
    trainer = trainer_on(layout, CONFIG, model, "bf16", plain, dtype=torch.float32)
    tokens = torch.randint(0, SHAPE.vocab, (1, 40))
    with torch.no_grad():
        found = trainer.model(tokens, position_ids=None, attention_mask=None)
        expected = reference(tokens).logits
    torch.testing.assert_close(found.view_as(expected), expected, rtol=1e-3, atol=1e-3)


def add_by_hand(attention: Any, gates: Tensor, out_norm: Tensor) -> None:
    seen: list[Tensor] = []

    def gate(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads = given[0].unflatten(-1, (len(gates), -1))
        return ((heads * torch.sigmoid(seen.pop() @ gates.T)[..., None]).flatten(-2),)

    attention.register_forward_pre_hook(lambda _, a, k: seen.append(k["hidden_states"]), with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(gate)
    attention.o_proj.register_forward_hook(lambda _, x, y: F.rms_norm(y, out_norm.shape, out_norm, 1e-6))


def test_the_family_says_what_its_cache_takes_and_what_a_budget_counts(model: Path) -> None:
    """The engine caches a key and a value for each query, twice as many as have weights."""
    shape = read_shape(model)
    head_dim, plain = shape.sizes.head_dim, replace(shape, families=qwen3_moe.ARCHITECTURE.families)
    assert shape.sizes.kv_heads == SHAPE.kv_heads and shape.kv_bytes() == 2 * plain.kv_bytes()
    assert shape.kv_bytes() == SHAPE.layers * 2 * SHAPE.heads * head_dim * 2
    spec = experiment(model={"path": str(model)}, numerics={"mode": "exact"})
    job = job_of(spec, shape, "kernels", 80e9)
    assert cache_bytes(job) == shape.kv_bytes()
    held = engine_memory(replace(job, kv_tokens=100)).held
    assert held["KV cache"]["rollout"] == 100 * shape.kv_bytes()


def test_its_formats_are_as_planned(model: Path, layout: Layout) -> None:
    trainer, batch = trainer_on(layout, CONFIG, model), random_batch(rows=4, longest=40)
    sightings = watch_step(trainer, batch, cross_entropy(batch), NUMERICS, trainer.config)
    assert differences_of(sightings) == []
    assert {each.key for each in sightings} >= {"scores.output", "attention.output", "product.activation"}


def test_a_mode_that_a_family_has_no_modules_for_is_refused(model: Path, layout: Layout) -> None:
    with pytest.raises(
        UserError, match=r"numerics\.mode: found 'native, on megatron, with a model of gated attention'"
    ):
        trainer_on(layout, CONFIG, model, numerics={"mode": "native"})


def test_load_export_sync_and_trace(model: Path, layout: Layout, tmp_path: Path) -> None:
    from fp8rl.trainer.op_trace import trace_ops

    trainer = trainer_on(layout, CONFIG, model)
    stored = load_file(model / "model.safetensors")
    exported = dict(trainer.weights.share(trainer.model))
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    convert_checkpoint(model, tmp_path / "served", NUMERICS.rollout_spec)
    with asyncio.Runner() as runner:
        plugin = {"numerics": NUMERICS.to_dict(), "architecture": FILE}
        expected = expected_report(NUMERICS, architecture=FILE)
        engine = make_engine(tmp_path / "engine.log", NUMERICS, plugin=plugin, expected=expected)
        endpoint = runner.run(engine.start(tmp_path / "served", 0))

        def agreed() -> TokenBatch:
            prompts = torch.randint(6, SHAPE.vocab, (4, 30)).tolist()
            answers = runner.run(engine.complete(prompts, SamplingParams(20, temperature=1.0), range(4)))
            assert {version for answer in answers for version in answer.weight_versions} == {trainer.weight_version}
            batch = batch_of_answers(prompts, answers)
            rows, scored = trainer.score(batch)
            d = (scored - batch.fields["rollout_logprobs"][rows])[batch.loss_mask[rows]]
            assert len(d) > 40 and not d.any()
            return batch

        try:
            (memory,) = runner.run(engine.memory())
            assert memory.kv_cache == read_shape(model).kv_bytes() * (16384 + 1)
            batch = agreed()
            trainer.train_step(batch, cross_entropy(batch))
            manifest, report, problems = push(trainer, TensorTransport(1 << 20), NUMERICS.rollout_spec, [endpoint], 1)
            assert problems == [] and report.mismatched_tensors == 0
            assert {OUT_NORM.format(1), GATES.format(1)} <= manifest.entries.keys()
            assert f"model.layers.0.mlp.{EXPERTS}.3.up_proj.weight_scale_inv" in manifest.entries
            trace = trace_ops(trainer, agreed())
            answer = runner.run(ask_engine(engine, trace))
        finally:
            runner.run(engine.stop())
    forward = trainer.definition.forward
    found = op_differences(forward, SHAPE.experts, trace, answer)
    assert {difference.differing for difference in found} == {0.0}
    assert all([d.layer for d in found if d.op == op] == [0, 1] for op in ("gates", "attention", "out_norm"))
    assert sum(site.op.form is GATED for site in forward.sites()) == SHAPE.layers
