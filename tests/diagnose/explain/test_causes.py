"""Comparison, temperature fit and ranking on hand-made data, and what a run or a capsule is read as."""

import json
import math
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from fp8rl.diagnose.explain import reported
from fp8rl.diagnose.explain.causes import Cause, Comparison
from fp8rl.diagnose.explain.differences import (
    ExpertDifference,
    OpDifference,
    TemperatureFit,
    expert_differences,
    fit_temperature,
    op_differences,
    relative_rms,
)
from fp8rl.diagnose.explain.rescore import recorded
from fp8rl.diagnose.subject import newest_run, read_subject
from fp8rl.models.architecture import Model
from fp8rl.models.architectures.qwen3_moe import ARCHITECTURE as QWEN3_MOE
from fp8rl.models.families.mlp import EXPERTS, TOPK
from fp8rl.models.program import ADD_NORM, EMBED, LINEAR, Forward, Op
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.guard.guard import GateState
from fp8rl.rollout.engine.protocol import ADAPTER_SCALE
from fp8rl.trainer.checkpoint.files import About, write_about
from fp8rl.weight_sync.manifest import Manifest
from tests.support.commands import shown
from tests.support.definitions import SIZES
from tests.support.scored_batches import CapsuleRun, scored_batch

MODEL = Model(QWEN3_MOE, replace(SIZES, layers=2))
SITES = [(site.layer, site.op.name) for site in MODEL.forward.sites()]
EXACT = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
DOWN = "model.layers.1.mlp.experts.5.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight_scale_inv"
NORM = "model.norm.weight"
ENTRIES = {DOWN: "a@7", DOWN.replace("down", "gate"): "b@7", QUERY: "c@7", NORM: "d"}


def clues(**changes: object) -> Comparison:
    """Both sides agree on everything but `changes`."""
    ops = [OpDifference(layer, op, 0.0, 0.0, 0.0) for layer, op in SITES]
    same = Comparison(
        MODEL, EXACT, Manifest("7", "digest", ENTRIES), dict(ENTRIES), 1.0, TemperatureFit(1.0, 0.0), ops=ops
    )
    return replace(same, **changes)


def differing(*found: tuple[int | None, str, float]) -> list[OpDifference]:
    sizes = {(layer, op): size for layer, op, size in found}
    return [
        OpDifference(layer, op, float((layer, op) in sizes), sizes.get((layer, op), 0.0), 1.0) for layer, op in SITES
    ]


def expert(layer: int, index: int, size: float) -> ExpertDifference:
    return ExpertDifference(layer, index, 10, size)


def scales(before: float, after: float) -> Cause:
    return Cause("scales", before, after, "fp32 scales in the engine")


def test_relative_rms_by_hand() -> None:
    for one, other, expected in (
        ([3.0, 4.0], [3.0, 4.5], 0.1), ([0.0, 0.0], [1.0, 1.0], math.inf), ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, math.nan], [1.0, 1.0], math.inf), ([], [], 0.0),
    ):  # fmt: skip
        assert relative_rms(torch.tensor(one), torch.tensor(other)) == pytest.approx(expected)


def test_an_op_is_compared_over_all_that_it_writes_in_whatever_dtype_and_a_choice_by_probabilities_of_all() -> None:
    ops = (
        Op("embed", EMBED, ("tokens",), ("x",)), Op("norm", ADD_NORM, ("x", "residual"), ("x", "residual")),
        Op("topk", TOPK, ("x",), ("probs", "chosen")),
    )  # fmt: skip
    written = {
        "embed:x": torch.ones(2, 3), "norm:x": torch.tensor([[1.0], [2.0]]),
        "norm:residual": torch.tensor([[2.0], [4.0]]), "topk:probs": torch.ones(2, 1),
    }  # fmt: skip
    trainer, engine = (written | {"topk:chosen": torch.tensor([[0], [second]])} for second in (0, 1))
    engine["norm:residual"] = torch.tensor([[2.0], [3.0]]).bfloat16()
    first, second, third = op_differences(Forward(ops, (), ()), 4, trainer, engine)
    assert (second.layer, second.op, second.differing, second.largest) == (None, "norm", 0.25, 1.0)
    assert second.relative_rms == pytest.approx(0.2) and (first.differing, third.differing) == (0.0, 0.25)


def test_experts_by_hand() -> None:
    """Three tokens, two of four experts each; expert 2's outputs are twice as large in the engine."""
    chosen = torch.tensor([[0, 2], [1, 2], [0, 1]])
    each = torch.ones(3, 2, 4)
    theirs = each.clone()
    theirs[0, 1] = theirs[1, 1] = 2.0
    trainer = {"layers.1.experts:each": each, "layers.1.topk:chosen": chosen}
    dense, topk = (Op("down", LINEAR, ("x",), ("x",)),), Op("topk", TOPK, ("x",), ("probs", "chosen"))
    forward = Forward((), (dense, (topk, Op("experts", EXPERTS, ("x", "probs", "chosen"), ("x",)))), ())
    found = expert_differences(forward, 4, trainer, {"layers.1.experts:each": theirs})
    assert [(e.expert, e.tokens, e.relative_rms) for e in found] == [(0, 2, 0.0), (1, 2, 0.0), (2, 2, 1.0), (3, 0, 0.0)]


@pytest.mark.parametrize("true", [0.7, 1.0, 0.83125, 2.5])
def test_the_temperature_of_a_record_is_found(true: float) -> None:
    """Against logprobs computed in float64; a record with noise, and one with values that are not finite."""
    draw = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(200, 50, generator=draw)).bfloat16()
    tokens = torch.randint(50, (200,), generator=draw)
    recorded = (logits.double() / true).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    fit = fit_temperature(logits, tokens, recorded)
    assert fit.temperature == pytest.approx(true, rel=1e-5) and fit.abs_diff_mean < 1e-5
    if true != 0.83125:
        assert fit.temperature == true
    noisy = recorded + 0.02 * torch.randn(200, generator=draw)
    noisy[3] = -math.inf
    fit = fit_temperature(logits, tokens, noisy)
    assert fit.temperature == pytest.approx(true, rel=0.01)
    assert fit.abs_diff_mean == pytest.approx(0.02 * math.sqrt(2 / math.pi), rel=0.2)


NINE = {f"model.layers.{layer}.self_attn.q_proj.weight": f"{layer}@7" for layer in range(9)}
OTHERS = {name: digest.replace("@7", "@6") for name, digest in NINE.items()}
QKV = "weights: layer 0 qkv: weights in the engine were not the weights of version 7"
CAUSES = [Cause("routing", 0.04, 0.01, "R3"), Cause("sampler", 0.04, 0.0, "")]
SMALL = differing((0, "post_norm", 0.003), (1, "experts", 0.02))
EXPERTS_DIFFER = differing((1, "experts", 0.2))


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({}, []),
        ({"held": ENTRIES | {DOWN: "x@7", QUERY: "y@7", NORM: "z"}, "experts": [expert(1, 4, 0.0), expert(1, 5, 0.31)],
          "ops": differing((0, "qkv", 0.1), (1, "experts", 0.2), (0, "rope", 0.9))},
         [r"weights: layer 1 experts, expert 5 differs \(relative RMS 0.31\): weights in the engine are not the w",
          "weights: layer 0 qkv differs", "weights: final_norm: weights in the engine", "op: the op rope"]),
        ({"model": Model(QWEN3_MOE, replace(SIZES, layers=9)), "expected": Manifest("7", "", NINE), "held": OTHERS},
         [r"weights: 9 of 9 weights in the engine are not the weights of version 7 \(model.layers.0.self_attn.q"]),
        ({"reproduced": 0.4}, ["state: .* 0.4.* to 0 now: other weights, stale operands of former weights or anothe"]),
        ({"reproduced": 0.4, "wrong": []}, ["by their digests the engine held the right weights, so either it"]),
        ({"nonfinite": 3, "wrong": []}, ["state: 3 recorded .* not finite.* now: other weights, stale operands"]),
        ({"reproduced": 0.4, "wrong": [ADAPTER_SCALE, f"{QUERY}#1/2"]}, ["weights: adapter.scale: wei", QKV, "state"]),
        ({"reproduced": 0.4, "causes": [scales(0.4, 0.0), scales(0.4, 0.1)]},
         ["scales: fp32 scales in the engine reproduce its record .the spec has pow2 .* 0.4 .* 0 ", "state"]),
        ({"reproduced": 1e-6, "wrong": []}, []),
        ({"fit": TemperatureFit(0.7, 1e-7), "reproduced": 0.4}, ["sampler: .*temperature 0.7, but the batch says 1 "]),
        ({"fit": TemperatureFit(5.8, 3.8), "reproduced": 12.8}, ["^state"]),  # a temperature must explain all
        ({"fit": TemperatureFit(1.001, 0.0), "reproduced": 1e-6}, []),
        ({"ops": differing((0, "router", 0.002), (0, "rope", 0.3), (1, "rope", 0.6), (None, "embed", 0.1))},
         [r"op: the op rope differs on equal inputs \(relative RMS 0.6, 100%.* of the elements\) \(layers.0.rope, lay",
          r"op: the op embed differs .*\(embed\)", r"op: the op router differs .*\(layers.0.router\)"]),
        ({"ops": EXPERTS_DIFFER, "experts": [expert(1, 0, 0.0), expert(1, 1, 0.0), expert(1, 3, 0.3)]},
         [r"\(layers.1.experts.3\)"]),
        ({"ops": EXPERTS_DIFFER, "experts": [expert(1, index, 0.3) for index in range(3)]}, [r"\(layers.1.experts\)"]),
        ({"ops": differing((1, "rope", 0.3)), "settings": {"rope": ("rope_theta", 2e4, 1e4)}},
         [r"rope_theta is 20000 in the trainer and 10000 in the engine \(layers.1.rope\)"]),
        ({"ops": SMALL}, ["experts", "post_norm"]),
        ({"ops": differing((0, "qkv", 0.03), (1, "qkv", 0.04), (0, "router", 0.01)),
          "numerics": replace(EXACT, trainer="bf16")},
         ["quantization: the trainer multiplies in BF16 and the engine in FP8 .* of qkv by 0.04", "the op router"]),
        ({"ops": differing((0, "experts", 0.03)), "causes": CAUSES}, ["op: the op experts", "routing: R3 changes"]),
    ],
)  # fmt: skip
def test_findings_are_ranked_and_said(seen, says: list[str]) -> None:
    found = [str(finding) for finding in clues(**seen).findings]
    assert len(found) == len(says), found
    assert all(re.search(pattern, text) for text, pattern in zip(found, says, strict=True)), found


def test_a_finding_names_its_tensors_or_the_places_of_its_ops() -> None:
    held = ENTRIES | dict.fromkeys((DOWN, QUERY, NORM), "x@7")
    found = clues(held=held, ops=differing((0, "rope", 0.3))).findings
    names = [("weights", (QUERY,)), ("weights", (DOWN,)), ("weights", (NORM,)), ("op", ("layers.0.rope",))]
    assert [(each.key, each.names) for each in found] == names
    assert all(each.remedy.endswith(".") and each.grade == "error" for each in found)


def test_a_difference_that_is_not_finite_is_null_in_the_report(tmp_path: Path) -> None:
    found = clues(ops=[OpDifference(0, "[b]", 1.0, math.inf, 1.0)], abs_diff_mean=0.1, tokens=9)
    path = CapsuleRun.make(tmp_path).write(4, ["planted"], scored_batch([0.5, 1.0], [0.25]), [0, 1])
    report = reported(read_subject(path), None, found)
    assert json.loads(report.to_json())["facts"]["compared"]["ops"][0]["relative_rms"] is None and not report.ok
    parts = ("mean |d| is 1.00e-01 on 9 sampled tokens", "op: the op [b] differs", "something differs")
    assert all(part in shown(report) for part in parts)


def test_a_difference_without_a_cause_is_said_and_so_are_a_run_s_capsules(tmp_path: Path) -> None:
    capsule = CapsuleRun.make(tmp_path).write(4, ["planted"], scored_batch([0.5, 1.0], [0.25]), [0, 1])
    of_capsule = read_subject(capsule)
    assert reported(of_capsule, None, clues(abs_diff_mean=1e-6)).findings == ()
    for seen in ({"abs_diff_mean": 0.1}, {"live_abs_diff_mean": 1e-9}):
        (finding,) = reported(of_capsule, None, clues(**seen)).findings
        assert (finding.key, finding.grade) == ("unexplained", "error")
    of_run = replace(of_capsule, capsule=None, path=capsule.parents[1])
    (note,) = reported(of_run, None, clues()).findings
    assert (note.key, note.grade) == ("capsules", "note") and f"fp8rl explain {capsule}" in note.remedy


def test_a_run_s_weights_are_its_newest_checkpoint_or_its_model(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    spec = load_experiment("examples/arithmetic_lora.yaml", ["trainer.tp=2", "adapter.mode=merged"])
    (run / "spec.yaml").write_text(spec.to_yaml())
    with pytest.raises(UserError, match="without model/, adapter/ or a checkpoint"):
        read_subject(run)
    (run / "adapter").mkdir()
    adapter = read_subject(run).experiment.adapter
    assert adapter is not None and adapter.start == str(run / "adapter")
    (run / "model").mkdir()
    subject = read_subject(run)
    assert (subject.experiment.model.path, subject.checkpoint) == (str(run / "model"), None)
    assert subject.experiment.adapter is None, "it is merged into model/ already"
    assert subject.numerics.k_splits == 2 and subject.capsule is None
    for step, bf16 in ((20, False), (100, True)):
        checkpoint = run / f"checkpoints/step_{step}"
        checkpoint.mkdir(parents=True)
        write_about(checkpoint, About(step, {"standing": asdict(GateState(bf16=bf16))}, {}))
    subject = read_subject(run)
    assert (subject.experiment.model.path, subject.checkpoint) == (spec.model.path, run / "checkpoints/step_100")
    assert subject.experiment.adapter == spec.adapter
    assert (subject.numerics.trainer, subject.numerics.rollout) == ("bf16", "bf16")
    assert (subject.name, subject.path) == ("demo", run)


def test_a_capsule_s_tokens_of_older_weights_are_not_compared(tmp_path: Path) -> None:
    seen = scored_batch([0.5, 1.0], [0.25])
    versions = seen.versions.clone()
    versions[0, 2] -= 1
    path = CapsuleRun.make(tmp_path).write(4, ["planted"], replace(seen, versions=versions), [0, 1])
    subject = read_subject(path)
    assert subject.capsule is not None and (subject.capsule.scored.version, subject.capsule.about.wrong) == (3, None)
    batch = recorded(subject.capsule)
    assert batch.loss_mask.nonzero().tolist() == [[0, 3], [1, 2]]
    d = batch.fields["train_logprobs"] - batch.fields["rollout_logprobs"]
    assert d[batch.loss_mask].tolist() == pytest.approx([1.0, 0.25])


def test_without_a_name_the_newest_run_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a folder with a run that made a step"):
        newest_run(tmp_path)
    for name, age in (("a", 1), ("b", 3), ("c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
        os.utime(tmp_path / name / "metrics.jsonl", (age, age))
    (tmp_path / "d").mkdir()
    assert newest_run(tmp_path) == tmp_path / "b"
