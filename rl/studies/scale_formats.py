"""Which scales does FP8 need: how fine, in which format, static or dynamic; and when do outliers make it matter?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from numerics.fake_quantize import fake_quantize_rows
from numerics.ops.linear import wide_mm
from numerics.spec import QuantSpec, TensorSpec
from rl.algorithms.sft import SftObjective
from rl.studies import figures, live
from rl.studies.claims import Claim
from rl.studies.lab import Lab
from rl.studies.products import Operands, Recorder
from rl.studies.spoiled import NarrowState, with_ops
from rl.studies.study import Measurement, Study, TextTable, by_arm
from rl.studies.subjects import random_model
from rl.studies.training import RATE, TrainedArm, teach

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHAINS, QUICK_CHAINS = 32, 8
OUTLIERS = (1.0, 1e2, 1e4)
"""Factors of the outlier channels' activations; their weights are divided by them, so that the product stays."""
CHANNELS = 0.01
"""Share of the channels that are outliers."""

_FP32 = TensorSpec(scale="fp32")
ROWS: dict[str, TensorSpec] = {
    "FP32 1x32": replace(_FP32, group=32),
    "FP32 1x128": _FP32,
    "FP32 axis": replace(_FP32, granularity="channel"),
    "FP32 tensor": replace(_FP32, granularity="tensor"),
    "pow2 1x32": TensorSpec(group=32),
    "pow2 1x128": TensorSpec(),
    "pow2 axis": TensorSpec(granularity="channel"),
    "pow2 tensor": TensorSpec(granularity="tensor"),
    "MX 1x32": TensorSpec(group=32, scale="e8m0"),
    "static 224": TensorSpec(fixed=224.0),
    "stochastic 1x128": TensorSpec(rounding="stochastic"),
    "E5M2 1x128": TensorSpec(format="e5m2"),
}
BLOCKS = {
    "FP32 128x128": TensorSpec(granularity="block", scale="fp32"),
    "pow2 128x128": TensorSpec(granularity="block"),
}
"""Of weights alone."""

FP8 = QuantSpec.preset("fp8_block_pow2")
SPECS = {
    "FP8, pow2 scales": FP8,
    "FP8, FP32 scales": QuantSpec.preset("fp8_block_fp32"),
    "MX": QuantSpec.preset("mxfp8"),
    "ironwood": QuantSpec.preset("ironwood"),
    "E5M2 gradients": FP8.override({"gradient": {"format": "e5m2"}}),
    "stochastic gradients": FP8.override({"gradient": {"rounding": "stochastic"}}),
}
BF16, AGAIN, SPOILED = "trained: BF16", "trained: FP8, pow2 scales, again", "trained: masters BF16"
NOISE = 0.0005
"""Nats of held-out loss that make no difference: seeds scatter by 0.0003."""
FREE = 0.001
"""Nats that a format may cost and still count as free, by the claims."""


def trained_arms() -> dict[str, TrainedArm]:
    """By name; each is made anew."""
    arms = {f"trained: {name}": TrainedArm(live.exact(spec)) for name, spec in SPECS.items()}
    masters = TrainedArm(after_step=NarrowState(masters="bf16"))
    return {BF16: TrainedArm(live.exact(FP8, "bf16")), **arms, AGAIN: TrainedArm(live.exact(FP8)), SPOILED: masters}


QUICK_TRAINED = (BF16, "trained: FP8, pow2 scales", AGAIN, SPOILED, "trained: ironwood")


def _error(
    id: str, says: str, arm: str, against: str, rule: str, bound: float = 1.0, *, role: str = "activation", **more: Any
) -> Claim:
    factor = more.pop("outliers", 1.0)
    settings: dict[str, Any] = {"contrast": "ratio", "rule": rule, "bounds": (bound,)}
    metric = error_name(role, factor)
    return Claim(id=id, says=says, metric=metric, arm=arm, against=against, **{**settings, **more})


def _free(id: str, says: str, arm: str) -> Claim:
    difference: dict[str, Any] = {"contrast": "difference", "rule": "within", "bounds": (-FREE, FREE)}
    return Claim(id=id, says=says, metric="nll", arm=arm, against=BF16, **difference)


def error_name(role: str, factor: float) -> str:
    """The metric's name: relative error of a product of which this role alone is quantized."""
    return f"error/{role}/outliers x{factor:g}"


CLAIMS = (
    Claim(
        id="same arm twice",
        says="The same training twice ends at the same loss, bit for bit.",
        metric="nll",
        arm=AGAIN,
        against="trained: FP8, pow2 scales",
        contrast="difference",
        rule="within",
        bounds=(0.0, 0.0),
        control="negative",
    ),
    Claim(
        id="BF16 masters",
        says="Masters in BF16 cost held-out loss.",
        metric="nll",
        arm=SPOILED,
        against="trained: FP8, pow2 scales",
        contrast="difference",
        rule="above",
        bounds=(0.0,),
        control="positive",
    ),
    _error("003-8", "E4M3 is finer than E5M2.", "E5M2 1x128", "pow2 1x128", "above", 1.5),
    _error("003-9a", "FP32 scales are more precise.", "pow2 1x128", "FP32 1x128", "above", margin=0.01),
    _error(
        "003-9b",
        "FP32 scales are more precise, outliers × 10⁴.",
        "pow2 1x128",
        "FP32 1x128",
        "above",
        margin=0.01,
        outliers=1e4,
    ),
    _error("000-5a", "Per axis is better than per tensor.", "FP32 axis", "FP32 tensor", "below", margin=0.01),
    _error(
        "000-5b",
        "Per axis is better than per tensor, outliers × 10⁴.",
        "FP32 axis",
        "FP32 tensor",
        "below",
        margin=0.01,
        outliers=1e4,
    ),
    _error(
        "000-6a",
        "Groups of 128 are not needed without outliers: per axis is at most 5% worse.",
        "FP32 axis",
        "FP32 1x128",
        "below",
        1.05,
    ),
    _error(
        "000-6b",
        "With outliers × 10⁴ groups of 128 are needed: per axis is at least 1.5 times worse.",
        "FP32 axis",
        "FP32 1x128",
        "above",
        1.5,
        outliers=1e4,
    ),
    _error(
        "000-7a",
        "Static scales suffice for activations without outliers: at most 5% worse than dynamic ones.",
        "static 224",
        "pow2 1x128",
        "below",
        1.05,
    ),
    _error("000-7b", "The same for weights.", "static 224", "pow2 1x128", "below", 1.05, role="weight"),
    _error(
        "000-7c",
        "Static scales suffice with outliers × 10⁴: at most 5% worse than dynamic ones.",
        "static 224",
        "pow2 1x128",
        "below",
        1.05,
        outliers=1e4,
    ),
    _error(
        "000-4a", "Rounding to nearest is better than stochastic rounding.", "stochastic 1x128", "pow2 1x128", "above"
    ),
    _free("000-2", "FP8 trains like BF16 (within 0.001 nats, as all that follow).", "trained: FP8, pow2 scales"),
    _free("003-9c", "So it does with FP32 scales.", "trained: FP8, FP32 scales"),
    _free(
        "003-11", "Activations per token, weights per block, gradients per token in E4M3.", "trained: FP8, FP32 scales"
    ),
    _free("000-6c", "So it does in MX.", "trained: MX"),
    _free("000-14", "So it does by the recipe for Ironwood: static scales, E5M2 gradients.", "trained: ironwood"),
    Claim(
        id="000-3",
        says="E5M2 is the format of gradients: with E4M3 more is lost.",
        metric="nll",
        arm="trained: FP8, pow2 scales",
        against="trained: E5M2 gradients",
        contrast="difference",
        rule="above",
        bounds=(0.0,),
        margin=NOISE,
    ),
    Claim(
        id="000-4b",
        says="Stochastic rounding of gradients costs held-out loss.",
        metric="nll",
        arm="trained: stochastic gradients",
        against="trained: FP8, pow2 scales",
        contrast="difference",
        rule="above",
        bounds=(0.0,),
        margin=NOISE,
    ),
)


def measure(lab: Lab) -> Measurement:
    """Errors of the products of one step of N, and trained arms."""
    lab.specs |= {name: spec.digest() for name, spec in SPECS.items()}
    count, chains = len(lab.seeds), QUICK_CHAINS if lab.quick else CHAINS
    errors = lab.each(_errors, [(seed, chains, lab.scratch) for seed in lab.seeds], "errors")
    values = by_arm(errors)
    arms = {name: arm for name, arm in trained_arms().items() if not lab.quick or name in QUICK_TRAINED}
    taught = lab.each(teach, [(arm, seed, lab.quick) for arm in arms.values() for seed in lab.seeds], "trained")
    for index, name in enumerate(arms):
        values[name] = {"nll": [one.nll for one in taught[index * count : (index + 1) * count]]}
    steps = max(len(one.losses) for one in taught)
    return Measurement(
        values=values,
        subject=f"errors: N, 29M parameters, random, {chains} chains; trained: M, 1.0M parameters, {steps} SFT steps",
    )


def _errors(seed: int, chains: int, scratch: Path) -> dict[str, dict[str, float]]:
    """By arm, then metric: means over the products of a forward and backward."""
    probe = _Probe(seed)
    with live.world(RATE) as layout:
        trainer = live.trainer_of(random_model(scratch, seed=seed), live.exact(FP8), layout, config=RATE)
        batch = live.chain_batch(live.TRAIN, seed, chains)
        with with_ops(**Recorder(_plain, probe).ops()):
            trainer.forward_backward(batch, SftObjective.of(batch))
    return {arm: {name: sum(of) / len(of) for name, of in metrics.items()} for arm, metrics in probe.found.items()}


def _plain(operands: Operands) -> Tensor:
    return wide_mm(operands.a, operands.b.t())


class _Probe:
    """Quantizes one operand of a product at a time by every spec; in forward products with outliers planted too."""

    def __init__(self, seed: int) -> None:
        self.found: dict[str, dict[str, list[float]]] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, operands: Operands) -> Mapping[str, float]:
        if operands.role == "wgrad":
            return {}
        if operands.role == "dgrad":
            self._measure("gradient", 1.0, operands.a, operands.b, ROWS)
            return {}
        channels = operands.a.shape[1]
        planted = torch.randperm(channels, generator=self._generator)[: max(1, round(CHANNELS * channels))]
        for factor in OUTLIERS:
            gain = torch.ones(channels)
            gain[planted] = factor
            x, w = operands.a.float() * gain, operands.b.float() / gain
            self._measure("activation", factor, x, w, ROWS)
            self._measure("weight", factor, w, x, ROWS | BLOCKS)
        return {}

    def _measure(self, role: str, factor: float, x: Tensor, other: Tensor, specs: Mapping[str, TensorSpec]) -> None:
        """The error of x [M, K] @ other [N, K]^T where x alone is quantized, by each spec."""
        x, other = x.float().contiguous(), other.double()
        exact = x.double() @ other.t()
        for name, spec in specs.items():
            got = fake_quantize_rows(x, spec).double() @ other.t()
            error = float((got - exact).norm() / exact.norm())
            self.found.setdefault(name, {}).setdefault(error_name(role, factor), []).append(error)


def draw(measurement: Measurement) -> Mapping[str, Figure]:
    errors = figures.figure("Error of products whose activations are quantized, over the size of outliers", height=3.8)
    shown = ("FP32 1x32", "FP32 1x128", "FP32 axis", "FP32 tensor", "pow2 1x128", "MX 1x32", "static 224")
    for index, arm in enumerate(shown):
        points = [measurement.of(arm, error_name("activation", factor)) for factor in OUTLIERS]
        figures.curve(errors.axes[0], OUTLIERS, points, name=arm, index=index, marker="o")
    errors.axes[0].set(xscale="log", yscale="log", xlabel="outlier channels × (1% of them)", ylabel="relative error")
    errors.axes[0].legend(ncols=2)
    trained = [name for name in measurement.values if name.startswith("trained: ") and name not in (BF16, AGAIN)]
    drawn = figures.figure("Held-out loss above BF16's, 100 SFT steps")
    bars = {"nats": [measurement.of(name, "nll", against=BF16) for name in trained]}
    figures.bars(drawn.axes[0], [name.removeprefix("trained: ") for name in trained], bars, label="nats per token")
    return {"outliers": errors, "trained": drawn}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    metrics = [
        *(error_name(role, factor) for role in ("activation", "weight") for factor in OUTLIERS),
        error_name("gradient", 1.0),
    ]
    rows = [
        [arm, *(f"{measurement.of(arm, m)[0]:.4g}" if m in measurement.values[arm] else "" for m in metrics)]
        for arm in (*ROWS, *BLOCKS)
    ]
    trained = []
    for name in measurement.values:
        if name.startswith("trained: "):
            value, low, high = measurement.of(name, "nll", against=BF16)
            nll = measurement.of(name, "nll")[0]
            trained.append([name, f"{nll:.5f}", f"{value:+.5f} ({low:+.5f} to {high:+.5f})"])
    columns = [metric.removeprefix("error/").replace("/outliers ", " ") for metric in metrics]
    return [
        TextTable("Relative error of a product of which one operand is quantized", ("arm", *columns), rows),
        TextTable("Trained", ("arm", "held-out NLL", "above BF16"), trained),
    ]


STUDY = Study(
    name="scale_formats",
    question="How fine do scales have to be, in which format, and may they be static?",
    seeds=5,
    claims=CLAIMS,
    measure=measure,
    draw=draw,
    tables=tables,
)
