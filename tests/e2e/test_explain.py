"""Known answers: a cause is planted on a live trainer and engine, and the first finding names it. test_agreement.py
has wrong weights and other ops."""

from __future__ import annotations

from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.diagnose.explain.causes import Comparison
from fp8rl.diagnose.explain.compare import compare
from fp8rl.numerics.sampling import Truncation
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.guard.capsule import write_capsule
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rollout.types import SamplingParams
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.commands import by_the_command
from tests.support.paths import EXAMPLES
from tests.support.plants import PLANT, stale_operands, states_of_another_request
from tests.support.rig import ALONE, MODELS, Pipeline, Rig, Setup

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CANARY = Canary.of(0, MODELS["moe"].vocab, 512, exact=True)


def test_nothing_is_found_where_nothing_is_planted(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    result = attributed(pipeline, pipeline.sample(0.7, count=len(ALONE)))
    assert result.findings == ()
    assert result.abs_diff_mean == result.live_abs_diff_mean == 0
    assert {difference.differing for difference in result.ops} == {0.0}
    assert {expert.relative_rms for expert in result.experts} == {0.0}
    layers = 3
    assert len(result.ops) == 1 + layers * 11 + 3
    assert len(result.experts) == layers * 8 and sum(e.tokens for e in result.experts if e.layer == 0) > 4000
    assert result.tokens > 300
    truncated = attributed(pipeline, pipeline.sample(0.7, count=4, cut=Truncation(top_p=0.5)))
    assert truncated.findings == () and truncated.tokens > 50, "what is recorded is of the kept tokens alone"


def test_another_temperature(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    batch = replace(pipeline.sample(0.7, count=6), temperature=1.0)
    result = attributed(pipeline, batch)
    (finding,) = result.findings
    assert finding.key == "sampler"
    assert "fit the temperature 0.7, but the batch says 1 " in finding.found
    (switched,) = [cause for cause in result.causes if cause.name == "sampler"]
    assert switched.before > 0.1 and switched.after == 0


def test_one_side_in_bf16(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    batch = pipeline.sample(1.0, count=4)
    numerics = replace(pipeline.setup.numerics, trainer="bf16")
    pipeline.trainer.apply(methodcaller("set_numerics", numerics))
    try:
        result = compare(pipeline.trainer, pipeline.endpoint, batch, numerics, pipeline.definition)
    finally:
        pipeline.trainer.apply(methodcaller("set_numerics", pipeline.setup.numerics))
    (finding,) = result.findings
    quantized = {"qkv", "o_proj", "experts"}
    places = {f"layers.{layer}.{op}" for layer in range(3) for op in quantized}
    assert finding.key == "quantization" and {*finding.names} == places
    assert {d.op for d in result.ops if d.differing} == quantized


def test_a_canary_is_answered_as_the_trainer_scores_it_alone_and_among_others(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    assert canary_difference(pipeline) == 0.0
    scored = pipeline.trainer.score(CANARY.batch)
    groups = [replace(CANARY.group, seeds=(CANARY.seed, 11)), CANARY.group]
    among, other, again = pipeline.generate(groups, SamplingParams(len(CANARY.answer_ids)))
    assert CANARY.difference(among, scored) == CANARY.difference(again, scored) == 0.0
    assert other.token_ids != CANARY.answer_ids, "what is drawn by an ordinary seed follows the logits"


def test_native_latent_attention_s_copies_follow_a_delta(rig: Rig) -> None:
    """SGLang multiplies by copies of kv_b_proj."""
    pipeline = rig.open(Setup("latent", mode="native"))
    batch = pipeline.sample(1.0, count=6)
    for _ in range(2):
        pipeline.train_step(batch)
        report = pipeline.sync(delta=True)
        assert report.mismatched_tensors == 0
    assert report.bytes < report.weight_bytes


def canary_difference(pipeline: Pipeline) -> float:
    """Between the engine's canary, which is asked for as runs do it, and the trainer's."""
    scored = pipeline.trainer.begin_score(CANARY.batch)
    (answer,) = pipeline.generate([CANARY.group], CANARY.sampling)
    assert answer.token_ids == CANARY.answer_ids and answer.prompt_ids == CANARY.prompt_ids
    return CANARY.difference(answer, scored())


def test_stale_operands_are_seen_by_the_canary_and_by_no_digest_and_a_capsule_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rig.only_ray()  # before the fault, or Ray would hand it on to the command's engine
    monkeypatch.setenv(PLANT, stale_operands.__name__)
    pipeline = rig.open(Setup("moe"))
    pipeline.train_step(pipeline.sample(1.0, seed=3, count=4))
    assert pipeline.sync(manifest=tmp_path / "manifest.json").mismatched == ()
    held = pipeline.rig.run(pipeline.engine.manifest())
    assert all(entry.endswith(f"@{pipeline.trainer.weight_version}") for entry in held.values() if "@" in entry)
    assert canary_difference(pipeline) > 0.01
    capsule = kept(pipeline, pipeline.sample(1.0, count=2), tmp_path)
    rig.stop_engine()
    monkeypatch.delenv(PLANT)
    finding, trainer = by_the_command(capsule).findings
    assert finding.key == "state" and "trainer and engine agree to 0 now" in finding.found
    assert "held the right weights, so either it computed with stale operands" in finding.found
    assert (trainer.key, trainer.grade) == ("trainer", "ok")


def test_states_that_are_not_a_sequences_own_are_named_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linear attention. The engine computes each op right, and does not give its own answers again."""
    rig.only_ray()
    monkeypatch.setenv(PLANT, states_of_another_request.__name__)
    pipeline = rig.open(Setup("qwen3_next"))
    first, *others = attributed(pipeline, pipeline.sample(1.0, count=len(ALONE), answers=1)).findings
    rig.stop_engine()
    assert first.key == "state" and "does not reproduce the recorded log-probabilities" in first.found and not others


def kept(pipeline: Pipeline, batch: TokenBatch, folder: Path) -> Path:
    """A capsule as a run writes it of the engine of now."""
    spec = folder / "spec.yaml"
    spec.write_text(
        load_experiment(EXAMPLES / "arithmetic.yaml", [f"model.path={pipeline.rig.models['moe']}"]).to_yaml()
    )
    held = [pipeline.rig.run(pipeline.engine.manifest())]
    step: dict[str, Any] = {"step": 7, "why": ["planted"], "rows": [0, 1], "experiment": spec, "held": held}
    step |= {"numerics": pipeline.setup.numerics, "manifest": folder / "manifest.json"}
    version, logprobs = pipeline.trainer.weight_version, pipeline.trainer.score(batch)
    scored = ScoredBatch(batch, torch.full_like(batch.tokens, version), version, logprobs)
    write_capsule(folder / "step_7", scored, pipeline.trainer.export_hf, **step)
    return folder / "step_7"


def attributed(pipeline: Pipeline, batch: TokenBatch) -> Comparison:
    return compare(pipeline.trainer, pipeline.endpoint, batch, pipeline.setup.numerics, pipeline.definition)
