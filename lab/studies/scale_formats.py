"""Which scales does FP8 need: how fine, in which format, static or dynamic; and when do outliers make it matter?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fp8rl.numerics.ops.linear import wide_mm
from fp8rl.numerics.quantize import fake_quantize_rows
from fp8rl.numerics.spec import QuantSpec, TensorSpec
from fp8rl.rl.algorithms.sft import SftObjective
from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab
from lab.studies.harness.products import Operands, ProductRecorder
from lab.studies.harness.spoiled import NarrowState, with_ops
from lab.studies.harness.study import Measurement, Study, TextTable, by_arm, with_interval
from lab.studies.harness.subjects import TRAIN, random_model
from lab.studies.harness.training import RATE, TrainedArm, teach

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
"""Formats of weights alone."""

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


def trained_arms() -> dict[str, TrainedArm]:
    """The trained arms by name; each is made anew."""
    arms = {f"trained: {name}": TrainedArm(live.exact(spec)) for name, spec in SPECS.items()}
    masters = TrainedArm(after_step=NarrowState(masters="bf16"))
    return {BF16: TrainedArm(live.exact(FP8, "bf16")), **arms, AGAIN: TrainedArm(live.exact(FP8)), SPOILED: masters}


QUICK_TRAINED = (BF16, "trained: FP8, pow2 scales", AGAIN, SPOILED, "trained: ironwood")


def error_name(role: str, factor: float) -> str:
    """The metric's name: relative error of a product of which this role alone is quantized."""
    return f"error/{role}/outliers x{factor:g}"


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
    """Mean errors over the products of a forward and backward, by arm, then metric."""
    probe = _Probe(seed)
    with live.world(RATE) as layout:
        trainer = live.trainer_of(random_model(scratch, seed=seed), live.exact(FP8), layout, config=RATE)
        batch = live.chain_batch(TRAIN, seed, chains)
        with with_ops(**ProductRecorder(_plain, probe).ops()):
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


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    errors = figures.figure("Error of products whose activations are quantized, over the size of outliers", height=3.8)
    shown = ("FP32 1x32", "FP32 1x128", "FP32 axis", "FP32 tensor", "pow2 1x128", "MX 1x32", "static 224")
    for index, arm in enumerate(shown):
        points = [measurement.of(arm, error_name("activation", factor)) for factor in OUTLIERS]
        figures.curve(errors.axes[0], OUTLIERS, points, name=arm, index=index, marker="o")
    errors.axes[0].set(xscale="log", yscale="log", xlabel="outlier channels × (1% of them)", ylabel="relative error")
    figures.legend(errors.axes[0])
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
        [arm, *(f"{measurement.mean(arm, m):.4g}" if m in measurement.values[arm] else "" for m in metrics)]
        for arm in (*ROWS, *BLOCKS)
    ]
    trained = []
    for name in measurement.values:
        if name.startswith("trained: "):
            above = with_interval(measurement.of(name, "nll", against=BF16), "+.5f")
            nll = measurement.mean(name, "nll")
            trained.append([name, f"{nll:.5f}", above])
    columns = [metric.removeprefix("error/").replace("/outliers ", " ") for metric in metrics]
    return [
        TextTable("Relative error of a product of which one operand is quantized", ("arm", *columns), rows),
        TextTable("Trained", ("arm", "held-out NLL", "above BF16"), trained),
    ]


STUDY = Study(
    name="scale_formats",
    question="How fine do scales have to be, in which format, and may they be static?",
    seeds=5,
    claims=claims_of("scale_formats"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={"nll": "nats"},
)
