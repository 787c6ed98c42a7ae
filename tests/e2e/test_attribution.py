"""Known answers: a cause is planted on a live trainer and engine, and the first finding names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.diagnose.attribution import Attribution, attribute
from fp8rl.numerics import ops
from fp8rl.numerics.sampling import Truncation
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.guard.capsule import read_capsule, write_capsule
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync import bridge
from fp8rl.weight_sync.manifest import SyncError
from fp8rl.weight_sync.served import served_tensors
from fp8rl.weight_sync.transports.tensor import TensorTransport
from tests.support import faults
from tests.support.cli_runs import SMALL
from tests.support.commands import by_the_command
from tests.support.live_runs import finished
from tests.support.paths import EXAMPLES
from tests.support.plants import PLANT, stale_operands
from tests.support.rig import ALONE, Pipeline, Rig, Setup

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCALES = "model.layers.1.self_attn.v_proj.weight_scale_inv"


def test_nothing_is_found_where_nothing_is_planted(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    result = attributed(pipeline, pipeline.sample(0.7, count=len(ALONE)))
    assert result.findings == ()
    assert result.abs_diff_mean == result.live_abs_diff_mean == 0
    assert {difference.differing for difference in result.ops} == {0.0}
    assert set(result.stream) == {0.0}
    assert {expert.relative_rms for expert in result.experts} == {0.0}
    layers = 3
    assert len(result.ops) == 1 + layers * 11 + 3
    assert len(result.experts) == layers * 8 and sum(e.tokens for e in result.experts if e.layer == 0) > 4000
    assert result.tokens == sum(bucket.tokens for bucket in result.positions) > 300
    truncated = attributed(pipeline, pipeline.sample(0.7, count=4, cut=Truncation(top_p=0.5)))
    assert truncated.findings == () and truncated.tokens > 50, "what is recorded is of the kept tokens alone"


def test_a_doubled_scale_in_the_engine(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    batch = pipeline.sample(1.0, count=4)
    put_in_engine(pipeline, SCALES, lambda scales: 2 * scales)
    result = attributed(pipeline, batch)
    pipeline.sync()
    first = result.findings[0]
    assert (first.cause, first.op, first.layers, first.tensors) == ("weights", "qkv", (1,), (SCALES,))
    assert "layer 1 qkv differs" in first.text and "v_proj scales are not those of version" in first.text
    assert [(d.layer, d.op) for d in result.ops if d.differing] == [(1, "qkv")]
    assert result.stream[:2] == (0.0, 0.0) and result.stream[2] > 0.01
    assert attributed(pipeline, pipeline.sample(1.0, count=4)).findings == ()


def test_a_stale_expert(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = rig.open(Setup("moe"))
    pipeline.train_step(pipeline.sample(1.0, count=4))
    make = bridge.make_transport
    with monkeypatch.context() as patch:
        patch.setattr(bridge, "make_transport", lambda *args: faults.Tampered(make(*args), faults.missed_expert))
        with pytest.raises(SyncError):
            pipeline.sync()
    pipeline.resume()  # nobody looked
    result = attributed(pipeline, pipeline.sample(1.0, count=len(ALONE)))
    pipeline.sync()
    first = result.findings[0]
    assert (first.cause, first.op, first.layers, first.experts) == ("weights", "experts", (1,), (5,))
    assert {"down_proj", "gate_proj", "up_proj"} <= {name.split(".")[-2] for name in first.tensors}
    assert "layer 1 experts: expert 5 differs" in first.text
    differing = {(e.layer, e.expert): e for e in result.experts if e.relative_rms > 0}
    assert differing.keys() == {(1, 5)}
    assert differing[1, 5].abs_diff_mean > differing[1, 5].abs_diff_rest


@pytest.mark.parametrize(
    ("plant", "op", "layers", "says"),
    [
        ("rope_base", "rope", (0, 1, 2), "rope_theta is 20000 in the trainer and 10000 in the engine"),
        ("fp32_router", "router", (0, 1, 2), "router differs in every layer on equal inputs"),
    ],
)
def test_another_definition_of_an_op(rig: Rig, plant: str, op: str, layers: tuple[int, ...], says: str) -> None:
    pipeline = rig.open(Setup("moe"))
    batch = pipeline.sample(1.0, count=6)
    pipeline.trainer.apply(PLANTS[plant])
    try:
        result = attributed(pipeline, batch)
    finally:
        pipeline.trainer.apply(restore)
    first = result.findings[0]
    assert (first.cause, first.op, first.layers) == ("op", op, layers)
    assert says in first.text
    assert {d.op for d in result.ops if d.differing} == {op}


def test_another_temperature(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    batch = replace(pipeline.sample(0.7, count=6), temperature=1.0)
    result = attributed(pipeline, batch)
    (finding,) = result.findings
    assert finding.cause == "sampler"
    assert "those of temperature 0.7, and the batch says 1 " in finding.text
    (switched,) = [cause for cause in result.causes if cause.name == "sampler"]
    assert switched.before > 0.1 and switched.after == 0


def test_one_side_in_bf16(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    batch = pipeline.sample(1.0, count=4)
    numerics = replace(pipeline.setup.numerics, trainer="bf16")
    pipeline.trainer.apply(methodcaller("set_numerics", numerics))
    try:
        result = attribute(pipeline.trainer, pipeline.endpoint, batch, numerics, pipeline.definition)
    finally:
        pipeline.trainer.apply(methodcaller("set_numerics", pipeline.setup.numerics))
    (finding,) = result.findings
    assert finding.cause == "quantization" and finding.layers == (0, 1, 2)
    assert {d.op for d in result.ops if d.differing} == {"qkv", "o_proj", "experts"}


def test_native_mode_s_own_ops_are_told_apart(rig: Rig) -> None:
    """Megatron rounds the router's probabilities and the softmax of attention to BF16, SGLang keeps FP32; their norms,
    their SwiGLU and their sums over experts round at other places. Products are the emulation on both sides."""
    pipeline = rig.open(Setup("moe", mode="native"))
    result = attributed(pipeline, pipeline.sample(1.0, count=6))
    assert result.findings[0].cause == "op" and result.findings[0].op in ("topk", "attention", "experts")
    largest = {op: max(d.relative_rms for d in result.ops if d.op == op) for op in {d.op for d in result.ops}}
    assert {op for op, size in largest.items() if size == 0} >= {"embed", "qkv", "o_proj", "rope", "router", "lm_head"}
    assert all(1e-3 < largest[op] < 0.05 for op in ("topk", "attention", "experts"))
    assert result.live_abs_diff_mean > 0.01
    off = attributed(pipeline, replace(pipeline.sample(0.7, count=6), temperature=1.0))
    assert off.findings[0].cause == "sampler" and "temperature 0.7" in off.findings[0].text


def test_native_latent_attention_is_told_apart_and_its_copies_follow_a_delta(rig: Rig) -> None:
    """Megatron expands keys and values from latents in FP8. SGLang multiplies by copies of kv_b_proj, and does not
    quantize latents; its factor of the experts' probabilities stands behind their sum."""
    pipeline = rig.open(Setup("latent", mode="native"))
    batch = pipeline.sample(1.0, count=6)
    result = attributed(pipeline, batch)
    assert (result.findings[0].cause, result.findings[0].op) == ("op", "attention")
    largest = {op: max(d.relative_rms for d in result.ops if d.op == op) for op in {d.op for d in result.ops}}
    equal = {"embed", "qkv_a", "q_a_norm", "q_b", "o_proj", "gate_up", "shared_gate_up", "shared_down", "lm_head"}
    assert {op for op, size in largest.items() if size == 0} >= equal
    assert 0.02 < largest["attention"] < 0.08 and max(largest["topk"], largest["experts"]) < 0.01
    for _ in range(2):
        pipeline.train_step(batch)
        report = pipeline.sync(delta=True)
        assert report.mismatched_tensors == 0
    assert report.bytes < report.weight_bytes


def test_a_capsule_of_a_bf16_trainer_beside_an_fp8_engine(rig: Rig, tmp_path: Path) -> None:
    """By the command, on a capsule of a run: the engine that is started holds no weights before a sync."""
    rig.only_ray()
    run = finished(tmp_path, *SMALL, "run.steps=1", "eval.problems=0", "numerics.trainer=bf16")
    recorded = read_capsule(run.capsule(1)).metrics["mismatch/train_rollout_logprob_abs_diff_mean"]
    found = by_the_command(run.capsule(1))
    first, second = found["findings"]
    assert first["text"].startswith("quantization: the trainer multiplies in BF16 and the engine in FP8")
    assert first["layers"] == [0, 1] and "both sides in BF16" in second["text"] and second["text"].endswith(" to 0")
    assert found["abs_diff_mean"] == pytest.approx(recorded, rel=1e-6)
    assert found["live_abs_diff_mean"] == pytest.approx(recorded, rel=1e-6)


def test_a_capsule_of_an_engine_with_stale_operands(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of which every digest is right."""
    rig.only_ray()  # before the fault, or Ray would hand it on to the command's engine
    monkeypatch.setenv(PLANT, stale_operands.__name__)
    pipeline = rig.open(Setup("moe"))
    pipeline.train_step(pipeline.sample(1.0, count=4))
    pipeline.sync(manifest=tmp_path / "manifest.json")
    capsule = kept(pipeline, pipeline.sample(1.0, count=2), tmp_path)
    rig.stop_engine()
    monkeypatch.delenv(PLANT)
    (finding,) = by_the_command(capsule)["findings"]
    assert finding["cause"] == "state" and "trainer and engine agree to 0 now" in finding["text"]
    assert "held the right weights, by their digests, so it computed with stale operands" in finding["text"]


def kept(pipeline: Pipeline, batch: TokenBatch, folder: Path) -> Path:
    """A capsule as a run writes it of the engine of now."""
    spec = folder / "spec.yaml"
    spec.write_text(
        load_experiment(EXAMPLES / "arithmetic.yaml", [f"model.path={pipeline.rig.models['moe']}"]).to_yaml()
    )
    held = [pipeline.rig.run(pipeline.engine.held())]
    step: dict[str, Any] = {"step": 7, "why": ["planted"], "rows": [0, 1], "experiment": spec, "held": held}
    step |= {"numerics": pipeline.setup.numerics, "manifest": folder / "manifest.json"}
    version, logprobs = pipeline.trainer.weight_version, pipeline.trainer.score(batch)
    scored = ScoredBatch(batch, torch.full_like(batch.tokens, version), version, logprobs)
    write_capsule(folder / "step_7", scored, pipeline.trainer.export_hf, **step)
    return folder / "step_7"


def attributed(pipeline: Pipeline, batch: TokenBatch) -> Attribution:
    return attribute(pipeline.trainer, pipeline.endpoint, batch, pipeline.setup.numerics, pipeline.definition)


def put_in_engine(pipeline: Pipeline, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace one tensor in the engine and commit it as if nothing had happened."""
    (tensor,) = pipeline.trainer.apply(served, pipeline.setup.numerics.rollout_spec, name)
    version = pipeline.trainer.weight_version

    async def put() -> None:
        async with EngineClient(await pipeline.engine.endpoint()) as engine:
            await TensorTransport(1 << 20).send([(name, change(tensor))], [engine], version)
            await engine.commit(version)

    pipeline.rig.run(put())


def served(trainer: Any, spec: Any, name: str) -> torch.Tensor:
    return dict(served_tensors(trainer.export_weights(), spec, trainer.definition))[name].clone()


def rope_base(trainer: Any) -> None:
    for layer in trainer.model.decoder.layers:
        layer.self_attention.core_attention.rope_theta *= 2


def fp32_router(trainer: Any) -> None:
    def gating(router: Any, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x.float(), router.weight.float())

    for layer in trainer.model.decoder.layers:
        layer.mlp.router.gating = gating.__get__(layer.mlp.router)


def restore(trainer: Any) -> None:
    for layer in trainer.model.decoder.layers:
        layer.self_attention.core_attention.rope_theta = trainer.definition.sizes.rope_theta
        vars(layer.mlp.router).pop("gating", None)


PLANTS = {"rope_base": rope_base, "fp32_router": fp32_router}
