"""Comparison, temperature fit and ranking on hand-made data."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8rl.diagnose.attribution import page_of
from fp8rl.diagnose.attribution.attribute import check_exact
from fp8rl.diagnose.attribution.attribution_report import (
    Attribution,
    Cause,
    ExpertDifference,
    Finding,
    OpDifference,
    write_page,
)
from fp8rl.diagnose.attribution.compare import (
    TemperatureFit,
    expert_differences,
    fit_temperature,
    op_differences,
    position_differences,
    relative_rms,
)
from fp8rl.diagnose.attribution.findings import Evidence, rank
from fp8rl.diagnose.subject import read_subject
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
from tests.support.commands import result_of
from tests.support.definitions import SIZES
from tests.support.scored_batches import CapsuleRun, scored_batch

MODEL = Model(QWEN3_MOE, replace(SIZES, layers=2))
SITES = [(site.layer, site.op.name) for site in MODEL.forward.sites()]
EXACT = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
DOWN = "model.layers.1.mlp.experts.5.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight_scale_inv"
NORM = "model.norm.weight"
ENTRIES = {DOWN: "a@7", DOWN.replace("down", "gate"): "b@7", QUERY: "c@7", NORM: "d"}


def clues(**changes: object) -> Evidence:
    """Both sides agree on everything but `changes`."""
    ops = [OpDifference(layer, op, 0.0, 0.0, 0.0) for layer, op in SITES]
    same = Evidence(
        MODEL, EXACT, Manifest("7", "digest", ENTRIES), dict(ENTRIES), 1.0, TemperatureFit(1.0, 0.0), ops=ops
    )
    return replace(same, **changes)


def differing(*found: tuple[int | None, str, float]) -> list[OpDifference]:
    sizes = {(layer, op): size for layer, op, size in found}
    return [
        OpDifference(layer, op, float((layer, op) in sizes), sizes.get((layer, op), 0.0), 1.0) for layer, op in SITES
    ]


def expert(layer: int, index: int, size: float) -> ExpertDifference:
    return ExpertDifference(layer, index, 10, size, 0.2, 0.1)


def scales(before: float, after: float) -> Cause:
    return Cause("scales", before, after, "fp32 scales in the engine")


def test_relative_rms_by_hand() -> None:
    for one, other, expected in (
        ([3.0, 4.0], [3.0, 4.5], 0.1), ([0.0, 0.0], [1.0, 1.0], math.inf), ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, math.nan], [1.0, 1.0], math.inf), ([], [], 0.0),
    ):  # fmt: skip
        assert relative_rms(torch.tensor(one), torch.tensor(other)) == pytest.approx(expected)


def test_an_op_is_compared_over_all_that_it_writes_in_whatever_dtype() -> None:
    ops = (
        Op("embed", EMBED, ("tokens",), ("x",)), Op("norm", ADD_NORM, ("x", "residual"), ("x", "residual")),
        Op("topk", TOPK, ("x",), ("probs", "chosen")),
    )  # fmt: skip
    written = {
        "embed:out.x": torch.ones(2, 3), "norm:out.x": torch.tensor([[1.0], [2.0]]),
        "norm:out.residual": torch.tensor([[2.0], [4.0]]), "topk:out.probs": torch.ones(2, 2),
    }  # fmt: skip
    trainer, engine = (written | {"topk:out.chosen": torch.full((2, 1), value)} for value in (0.0, 1.0))
    engine["norm:out.residual"] = torch.tensor([[2.0], [3.0]]).bfloat16()
    first, second, third = op_differences(Forward(ops, (), ()), trainer, engine)
    assert (second.layer, second.op, second.differing, second.largest) == (None, "norm", 0.25, 1.0)
    assert second.relative_rms == pytest.approx(0.2) and (first.differing, third.differing) == (0.0, 0.0)


def test_experts_by_hand() -> None:
    """Three tokens, two of four experts each; expert 2's outputs are twice as large in the engine."""
    chosen = torch.tensor([[0, 2], [1, 2], [0, 1]])
    each = torch.ones(3, 2, 4)
    theirs = each.clone()
    theirs[0, 1] = theirs[1, 1] = 2.0
    given = {"layers.1.experts:in.chosen": chosen, "layers.1.experts:in.probs": torch.zeros(3, 4)}
    trainer = {"layers.1.experts:each": each, **given}
    dense = (Op("down", LINEAR, ("x",), ("x",)),)
    forward = Forward((), (dense, (Op("experts", EXPERTS, ("x", "probs", "chosen"), ("x",)),)), ())
    abs_d = torch.tensor([0.3, 0.5, 0.1], dtype=torch.float64)
    used = torch.tensor([True, True, False])
    found = expert_differences(forward, trainer, {"layers.1.experts:each": theirs}, abs_d, used)
    assert [(e.expert, e.tokens, e.relative_rms) for e in found] == [(0, 2, 0.0), (1, 2, 0.0), (2, 2, 1.0), (3, 0, 0.0)]
    assert [e.abs_diff_mean for e in found[:3]] == pytest.approx([0.3, 0.5, 0.4])
    assert [e.abs_diff_rest for e in found[:2]] == pytest.approx([0.5, 0.3])
    assert math.isnan(found[2].abs_diff_rest) and math.isnan(found[3].abs_diff_mean)


def test_positions_by_hand() -> None:
    d = torch.zeros(2, 100)
    mask = torch.zeros(2, 100, dtype=torch.bool)
    d[0, 31], d[0, 32], d[1, 63], d[1, 64], d[1, 70] = -1.0, 2.0, 4.0, 8.0, math.nan
    mask[0, 31] = mask[0, 32] = mask[1, 63] = mask[1, 64] = mask[1, 70] = True
    found = [(p.start, p.stop, p.tokens, p.abs_diff_mean) for p in position_differences(d, mask)]
    assert found == [(0, 32, 1, 1.0), (32, 64, 2, 3.0), (64, 128, 1, 8.0)]


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
QKV = "layer 0 qkv: in the engine, q_proj scales were not"
CAUSES = [Cause("routing", 0.04, 0.01, "R3"), Cause("sampler", 0.04, 0.0, "")]
SMALL = differing((0, "post_norm", 0.003), (1, "experts", 0.02))
EXPERTS_DIFFER = differing((1, "experts", 0.2))


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({}, []),
        ({"held": ENTRIES | {DOWN: "x@7", QUERY: "y@7", NORM: "z"}, "experts": [expert(1, 4, 0.0), expert(1, 5, 0.31)],
          "ops": differing((0, "qkv", 0.1), (1, "experts", 0.2), (0, "rope", 0.9))},
         [r"weights: layer 1 experts: expert 5 differs \(relative RMS 0.31\): in the engine, down_proj are not those o",
          "weights: layer 0 qkv differs.*q_proj scales are not", "weights: final_norm: in the engine", "op: rope"]),
        ({"model": Model(QWEN3_MOE, replace(SIZES, layers=9)), "expected": Manifest("7", "", NINE), "held": OTHERS},
         ["weights: 9 of 9 weights in the engine are not those of version 7$"]),
        ({"reproduced": 0.4}, ["state: .* 0.4.* to 0 now: other weights, stale operands of former weights or anothe"]),
        ({"reproduced": 0.4, "wrong": []}, ["held the right weights, by their digests, so it computed with stale"]),
        ({"nonfinite": 3, "wrong": []}, ["state: 3 recorded .* not finite.* now: other weights, stale operands"]),
        ({"reproduced": 0.4, "wrong": [ADAPTER_SCALE, f"{QUERY}#1/2"]}, ["adapter.scale: in the engin", QKV, "state"]),
        ({"reproduced": 0.4, "causes": [scales(0.4, 0.0), scales(0.4, 0.1)]},
         ["scales: fp32 scales in the engine, where the numerics say pow2, give its record .* 0.4 .* 0 ", "state"]),
        ({"rescored": 0.2}, ["state: the trainer does not reproduce its recorded .* 0.2.* in other numerics or with"]),
        ({"rescored": 1e-6, "reproduced": 1e-6, "wrong": []}, []),
        ({"fit": TemperatureFit(0.7, 1e-7), "reproduced": 0.4}, ["sampler: .*temperature 0.7, and the batch says 1 "]),
        ({"fit": TemperatureFit(5.8, 3.8), "reproduced": 12.8}, ["^state"]),  # a temperature must explain all
        ({"fit": TemperatureFit(1.001, 0.0), "reproduced": 1e-6}, []),
        ({"ops": differing((0, "router", 0.002), (0, "rope", 0.3), (1, "rope", 0.6), (None, "embed", 0.1))},
         [r"op: rope differs in every layer on equal inputs \(relative RMS 0.6, 100%.*; it is fp8rl\.n",
          "op: embed differs", "op: router differs in layer 0 on equal inputs"]),
        ({"ops": EXPERTS_DIFFER, "experts": [expert(1, 0, 0.0), expert(1, 1, 0.0), expert(1, 3, 0.3)]}, ["expert 3 "]),
        ({"ops": EXPERTS_DIFFER, "experts": [expert(1, index, 0.3) for index in range(3)]}, ["op: experts differ in "]),
        ({"ops": differing((1, "rope", 0.3)), "settings": {"rope": ("rope_theta", 2e4, 1e4)}},
         ["rope_theta is 20000 in the trainer and 10000 in the engine$"]),
        ({"ops": SMALL}, ["experts", "post_norm"]),
        ({"ops": differing((0, "qkv", 0.03), (1, "qkv", 0.04), (0, "router", 0.01)),
          "numerics": replace(EXACT, trainer="bf16")},
         ["quantization: .*the trainer multiplies in BF16 and the engine in FP8 .* of qkv by 0.04", "op: router"]),
        ({"ops": differing((0, "experts", 0.03)), "causes": CAUSES}, ["op: experts", "routing: R3 takes"]),
    ],
)  # fmt: skip
def test_findings_are_ranked_and_said(seen, says: list[str]) -> None:
    found = [f"{finding.cause}: {finding.text}" for finding in rank(clues(**seen))]
    assert len(found) == len(says), found
    assert all(re.search(pattern, text) for text, pattern in zip(found, says, strict=True)), found


def test_a_finding_names_its_layers_op_experts_and_tensors() -> None:
    found = rank(clues(held=ENTRIES | dict.fromkeys((DOWN, QUERY, NORM), "x@7"), ops=differing((0, "rope", 0.3))))
    assert [(f.layers, f.op, f.experts, f.tensors) for f in found] == [
        ((0,), "qkv", (), (QUERY,)),
        ((1,), "experts", (5,), (DOWN,)),
        ((), "final_norm", (), (NORM,)),
        ((0,), "rope", (), ()),
    ]


def test_the_page_is_self_contained_and_its_numbers_stand_beside_it(tmp_path: Path) -> None:
    ops = differing((0, "rope", 0.3), (1, "experts", math.inf))
    attribution = Attribution(
        findings=(Finding("op", "rope differs </script><b>"),), abs_diff_mean=0.1, tokens=10, ops=tuple(ops),
        stream=(0.0, 0.5), experts=(expert(0, 0, 0.0), expert(1, 0, math.inf)),
        causes=(Cause("routing", 0.2, 0.1, "R3"),),
        positions=tuple(position_differences(torch.ones(1, 8), torch.ones(1, 8, dtype=torch.bool))),
    )  # fmt: skip
    write_page(attribution, "demo", tmp_path / "attribution.html")
    page = (tmp_path / "attribution.html").read_text()
    assert "rope differs &lt;/script&gt;&lt;b&gt;" in page
    assert 'src="http' not in page and page.count('class="plot"') == 3
    values = json.loads((tmp_path / "attribution.json").read_text())
    assert values["ops"][-4]["relative_rms"] is None and values["findings"][0]["cause"] == "op"


def test_a_run_s_weights_are_its_newest_checkpoint_or_its_model(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    spec = load_experiment("examples/arithmetic_lora.yaml", ["trainer.tp=2", "adapter.mode=merged"])
    (run / "spec.yaml").write_text(spec.to_yaml())
    with pytest.raises(UserError, match="without model/, adapter/ or a checkpoint"):
        read_subject(run, "attribute")
    (run / "adapter").mkdir()
    adapter = read_subject(run, "attribute").experiment.adapter
    assert adapter is not None and adapter.start == str(run / "adapter")
    (run / "model").mkdir()
    subject = read_subject(run, "attribute")
    assert (subject.experiment.model.path, subject.checkpoint) == (str(run / "model"), None)
    assert subject.experiment.adapter is None, "it is merged into model/ already"
    assert subject.numerics.k_splits == 2 and subject.batch is None
    for step, bf16 in ((20, False), (100, True)):
        checkpoint = run / f"checkpoints/step_{step}"
        checkpoint.mkdir(parents=True)
        write_about(checkpoint, About(step, {"standing": GateState(bf16=bf16).to_dict()}, {}))
    subject = read_subject(run, "attribute")
    assert (subject.experiment.model.path, subject.checkpoint) == (spec.model.path, run / "checkpoints/step_100")
    assert subject.experiment.adapter == spec.adapter
    assert (subject.numerics.trainer, subject.numerics.rollout) == ("bf16", "bf16")
    assert (subject.name, page_of(subject)) == ("demo", run / "attribution.html")


def test_a_capsule_s_tokens_of_older_weights_are_not_attributed(tmp_path: Path) -> None:
    seen = scored_batch([0.5, 1.0], [0.25])
    versions = seen.versions.clone()
    versions[0, 2] -= 1
    path = CapsuleRun.make(tmp_path).write(4, ["planted"], replace(seen, versions=versions), [0, 1])
    subject = read_subject(path, "attribute")
    assert subject.batch is not None and subject.batch.loss_mask.nonzero().tolist() == [[0, 3], [1, 2]]
    d = subject.batch.fields["train_logprobs"] - subject.batch.fields["rollout_logprobs"]
    assert d[subject.batch.loss_mask].tolist() == pytest.approx([1.0, 0.25])
    assert (subject.version, subject.wrong) == (3, None)


def test_what_cannot_be_attributed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found 'native', expected exact, in which both sides run one program"):
        check_exact(replace(EXACT, mode="native"))
    refused = result_of("attribute", tmp_path)
    assert refused.exit_code == 2 and "expected the directory of a run or of a capsule" in refused.output
