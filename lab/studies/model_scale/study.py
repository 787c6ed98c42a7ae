"""Does the mismatch between trainer and rollout grow with the model, and more where only the rollout is in FP8?

In native mode each side computes with its library's own ops. No engine runs here, so as to reach models of many sizes:
the shared ops of exact mode stand for the engine's, and Megatron's own for the trainer's, on the same weights. That is
two implementations of one model which round in different places, as trainer and engine are; a full run holds one of the
models against a live engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl.models.tiny import TinyModel
from lab.studies.harness import figures, live
from lab.studies.harness.claims import Claim, difference, ratio, value
from lab.studies.harness.lab import Lab
from lab.studies.harness.study import Measurement, Study, TextTable, with_interval
from lab.studies.model_scale.two_sides import ENTROPY, PAIRS, beside_engine, mismatch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = TinyModel(layers=4, hidden=256, intermediate=256, experts=8, top_k=2)
GROWING = (
    TinyModel(layers=1, hidden=128, intermediate=128, experts=4, top_k=2),
    TinyModel(layers=2, hidden=128, intermediate=128, experts=8, top_k=2),
    BASE,
    TinyModel(layers=8, hidden=256, intermediate=256, experts=16, top_k=2),
    TinyModel(layers=16, hidden=256, intermediate=256, experts=16, top_k=2),
)
"""Models that grow in everything at once: 0.3M to 55M parameters."""
QUICK_GROWING = GROWING[:3]
LIVE = GROWING[1]
"""What is held against a live engine."""
AXES: dict[str, tuple[TinyModel, ...]] = {
    "layers": tuple(replace(BASE, layers=count) for count in (1, 2, 4, 8, 16)),
    "hidden": tuple(replace(BASE, hidden=size, intermediate=size) for size in (128, 256, 512)),
    "experts": tuple(replace(BASE, experts=count) for count in (4, 8, 16, 64)),
    "top_k": tuple(replace(BASE, top_k=count) for count in (1, 2, 4, 8)),
}
"""Models that grow in one thing alone."""
QUICK_AXES = {"layers": AXES["layers"][:4]}

SLOPE = "slope over {}"
"""The slope of the logarithm of abs d over the logarithm of the size."""


def _grows(id: str, says: str, over: str, pair: str = "BF16/FP8") -> Claim:
    return value(id, says, SLOPE.format(over), pair, "above", 0.0, margin=0.05)


CLAIMS = (
    value(
        "same ops",
        "Where both sides have the same ops, d is 0 in every model.",
        "largest abs d",
        "FP8/FP8, same ops",
        "within",
        0.0,
        0.0,
        control="negative",
    ),
    ratio(
        "mixed scales",
        "Power-of-two scales on one side and FP32 scales on the other make d at least 1.25 times as large.",
        "abs d/base",
        "FP8/FP8, mixed scales",
        "FP8/FP8",
        "above",
        1.25,
        control="positive",
    ),
    _grows("003-2a", "The mismatch of BF16 training and FP8 rollout grows with the model.", "parameters"),
    difference(
        "003-2b",
        "It grows faster than where both sides are in FP8.",
        SLOPE.format("parameters"),
        "BF16/FP8",
        "FP8/FP8",
        "above",
        0.0,
        margin=0.02,
    ),
    ratio(
        "003-2c",
        "In the largest model it is larger than where both sides are in FP8.",
        "abs d/largest",
        "BF16/FP8",
        "FP8/FP8",
        "above",
        1.0,
        margin=0.05,
    ),
    _grows("003-2d", "It grows with the depth.", "layers"),
    _grows("003-2e", "It grows with the width.", "hidden"),
    _grows("003-2f", "It grows with the number of experts.", "experts"),
    _grows("003-2g", "It grows with the experts of a token.", "top_k"),
    *(
        ratio(
            f"the engine's stand-in, {pair}",
            f"Beside a live native engine d is what it is beside the shared ops, to a half ({pair}).",
            "abs d",
            f"live: {pair}",
            f"stand-in: {pair}",
            "within",
            2 / 3,
            3 / 2,
        )
        for pair in ("BF16/FP8", "FP8/FP8")
    ),
)


def measure(lab: Lab) -> Measurement:
    """Every pair on every model; a seed has weights and contexts of its own."""
    growing, axes = (QUICK_GROWING, QUICK_AXES) if lab.quick else (GROWING, AXES)
    shapes = list(dict.fromkeys([*growing, *(shape for shapes in axes.values() for shape in shapes)]))
    jobs = [(shape, seed, lab.scratch) for seed in lab.seeds for shape in shapes]
    found = dict(zip([job[:2] for job in jobs], lab.each(mismatch, jobs, "models"), strict=True))
    lab.specs |= {preset: live.exact(preset).spec.digest() for preset in ("fp8_block_pow2", "fp8_block_fp32")}
    parameters = {shape: found[shape, lab.seeds[0]].parameters for shape in shapes}
    sizes = {"parameters": [parameters[shape] for shape in growing]} | {
        axis: [getattr(shape, axis) for shape in shapes] for axis, shapes in axes.items()
    }
    along = {"parameters": growing, **axes}
    values: dict[str, dict[str, Any]] = {pair: {} for pair in PAIRS}
    for pair, metrics in values.items():

        def of(shape: TinyModel, seed: int, pair: str = pair) -> float:
            return found[shape, seed].abs_d[pair]

        for axis, models in along.items():
            for size, shape in zip(sizes[axis], models, strict=True):
                metrics[f"abs d/{axis}={size}"] = [of(shape, seed) for seed in lab.seeds]
            if not pair.endswith("same ops"):
                each = [[of(shape, seed) for shape in models] for seed in lab.seeds]
                metrics[SLOPE.format(axis)] = [slope(sizes[axis], numbers) for numbers in each]
        metrics["abs d/base"] = [of(BASE, seed) for seed in lab.seeds]
        metrics["abs d/largest"] = [of(growing[-1], seed) for seed in lab.seeds]
        metrics["largest abs d"] = [max(of(shape, seed) for shape in shapes) for seed in lab.seeds]
    if not lab.quick:
        lab.say("beside a live engine")
        values |= lab.alone(beside_engine, LIVE, lab.seeds, lab.scratch)
    low, high = (f"{number / 1e6:.1f}M" for number in (min(parameters.values()), max(parameters.values())))
    return Measurement(
        values=values,
        subject=f"random Qwen3-MoE of {low} to {high} parameters, logits scaled to {ENTROPY:g} nats of entropy, native "
        "mode, the shared ops in place of an engine's",
        details={"sizes": sizes, "shapes": [[str(shape), parameters[shape]] for shape in shapes]},
    )


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the logarithms, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def draw(measurement: Measurement) -> Mapping[str, Figure]:
    sizes = measurement.details["sizes"]
    return {f"abs_d_over_{axis}": _over(measurement, axis, sizes[axis]) for axis in sizes}


def _over(measurement: Measurement, axis: str, sizes: Sequence[float]) -> Figure:
    figure = figures.figure(f"Mismatch over {NAMES[axis]}")
    axes = figure.axes[0]
    shown = [pair for pair in PAIRS if not pair.endswith("same ops")]
    for index, pair in enumerate(shown):
        values = [measurement.of(pair, f"abs d/{axis}={size}") for size in sizes]
        value, low, high = measurement.of(pair, SLOPE.format(axis))
        name = f"{pair}: slope {value:.2f} ({low:.2f} to {high:.2f})"
        points = [(middle, max(low, middle / 10), high) for middle, low, high in values]
        figures.curve(axes, sizes, points, name=name, index=index, marker="o")
    axes.set(xscale="log", yscale="log", xlabel=NAMES[axis], ylabel="mean abs d, nats")
    figures.legend(axes, columns=2)
    return figure


NAMES = {
    "parameters": "parameters",
    "layers": "layers",
    "hidden": "hidden size",
    "experts": "experts of a layer",
    "top_k": "experts of a token",
}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    found = [_table(measurement, axis, sizes) for axis, sizes in measurement.details["sizes"].items()]
    engine = [
        [arm, with_interval(measurement.of(arm, "abs d"), ".3f")] for arm in measurement.values if arm not in PAIRS
    ]
    beside = TextTable("Mean abs d beside a live engine, and beside the shared ops", ("", "nats"), engine)
    return [*found, beside] if engine else found


def _table(measurement: Measurement, axis: str, sizes: Sequence[float]) -> TextTable:
    shown = [pair for pair in PAIRS if not pair.endswith("same ops")]
    rows = [
        [f"{size:,}", *(f"{measurement.mean(pair, f'abs d/{axis}={size}'):.4g}" for pair in shown)] for size in sizes
    ]
    slopes = [with_interval(measurement.of(pair, SLOPE.format(axis)), ".3f") for pair in shown]
    columns = (NAMES[axis], *shown)
    return TextTable(f"Mean abs d over {NAMES[axis]}, nats", columns, [*rows, ["slope of the logarithms", *slopes]])


STUDY = Study(
    name="model_scale",
    question="Does the mismatch grow with the model, and more where only the rollout is in FP8?",
    claims=CLAIMS,
    measure=measure,
    seeds=5,
    draw=draw,
    tables=tables,
    units={
        "largest abs d": "nats",
        **{f"slope over {axis}": "(exponent)" for axis in ("parameters", "layers", "hidden", "experts", "top_k")},
    },
)
