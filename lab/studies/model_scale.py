"""Does the mismatch between trainer and rollout grow with the model, and more where only the rollout is in FP8?

In native mode each side computes with its library's own ops. No engine runs here, so as to reach models of many sizes:
the shared ops of exact mode stand for the engine's, and Megatron's own for the trainer's, on the same weights. That is
two implementations of one model which round in different places, as trainer and engine are; a full run holds one of the
models against a live engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fp8rl.numerics.config import NumericsConfig, RolloutPrecision, TrainerPrecision
from fp8rl.trainer.config import TrainerSpec
from fp8rl.trainer.step.batch import TokenBatch
from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab
from lab.studies.harness.study import Measurement, Study, TextTable, with_interval
from lab.studies.harness.subjects import TRAIN, random_model
from tests.support.tiny_model import TinyModel

if TYPE_CHECKING:
    from fp8rl.trainer.distributed.layout import Layout
    from fp8rl.trainer.scorer import Scorer

SEQUENCES, LENGTH = 16, live.LONGEST
ENTROPY = 2.0
"""Mean entropy of the next token in nats, to which the logits of every model are scaled; of 128 tokens it is 4.85 at
most."""
PROMPTS, ANSWERS = 16, 4
"""Prompts of each seed beside an engine, and answers to each."""
POW2, FP32 = "fp8_block_pow2", "fp8_block_fp32"


@dataclass(frozen=True)
class Pair:
    """The numerics of the two sides: a precision, and a preset. native: the trainer has Megatron's own ops."""

    trainer: TrainerPrecision
    rollout: RolloutPrecision
    rollout_spec: str = POW2
    native: bool = True


PAIRS = {
    "BF16/BF16": Pair("bf16", "bf16"),
    "BF16/FP8": Pair("bf16", "fp8"),
    "FP8/FP8": Pair("fp8", "fp8"),
    "FP8/FP8, mixed scales": Pair("fp8", "fp8", rollout_spec=FP32),
    "FP8/FP8, same ops": Pair("fp8", "fp8", native=False),
}
"""Trainer / rollout."""


@dataclass(frozen=True)
class Found:
    """Findings of one model: its parameters, and the mean abs d of each pair in nats."""

    parameters: int
    abs_d: dict[str, float]


def mismatch(shape: TinyModel, seed: int, scratch: Path) -> Found:
    """The expected abs d of a token that the rollout would sample, for every pair, on a random model.

    In each of many random contexts the expectation over the vocabulary is taken, instead of one token. The logits are
    divided by the number that gives the BF16 rollout `ENTROPY`, in FP32: weights of the head divided by it would give
    the same, as rounding is relative.
    """
    path = random_model(scratch, shape, seed)
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(0, shape.vocab, (SEQUENCES, LENGTH), generator=generator)
    nothing = torch.zeros(contexts.shape, dtype=torch.bool)
    batch = TokenBatch(contexts, torch.full((SEQUENCES,), LENGTH), nothing)
    with live.world() as layout:
        sides = {native: _side(path, layout, native) for native in (False, True)}
        parameters = sum(parameter.numel() for parameter in sides[True].model.parameters())
        batch = replace(batch, temperature=temperature_for(live.log_policy(sides[False], batch)))
        abs_d = {}
        for name, pair in PAIRS.items():
            sides[pair.native].set_numerics(_numerics(pair.trainer, POW2, pair.native))
            trainer = live.log_policy(sides[pair.native], batch)
            sides[False].set_numerics(_numerics(pair.rollout, pair.rollout_spec, False))
            abs_d[name] = expected_abs_d(trainer, live.log_policy(sides[False], batch))
    shutil.rmtree(path)
    return Found(parameters, abs_d)


def beside_engine(shape: TinyModel, seeds: Sequence[int], scratch: Path) -> dict[str, dict[str, list[list[float]]]]:
    """abs d of tokens that a live native FP8 engine samples, by sequence and seed: to the engine's log-probabilities,
    and to those that the shared ops give them. By arm, then metric; a seed has prompts of its own."""
    path = random_model(scratch, shape, seeds[0])
    with live.world() as layout:
        contexts = live.chain_batch(TRAIN, 0, SEQUENCES)
        temperature = temperature_for(live.log_policy(_side(path, layout, native=False), contexts))
    with live.beside_engine(path, "native") as stack:
        batches = [live.sampled_by_engine(stack, seed, PROMPTS, ANSWERS, temperature).batch for seed in seeds]
        trainers = {
            pair: [
                stack.trainer.apply(partial(_logprobs, precision=PAIRS[pair].trainer), batch)[0] for batch in batches
            ]
            for pair in ("BF16/FP8", "FP8/FP8")
        }
    with live.world() as layout:
        shared = _side(path, layout, native=False)
        shared.set_numerics(_numerics("fp8", POW2, False))
        stand_in = [live.logprobs(shared, batch) for batch in batches]
    engine = [batch.fields["rollout_logprobs"] for batch in batches]
    return {
        f"{name}: {pair}": {
            "abs d": [
                live.by_sequence((mine - theirs).abs(), batch)
                for mine, theirs, batch in zip(trainer, rollout, batches, strict=True)
            ]
        }
        for pair, trainer in trainers.items()
        for name, rollout in (("live", engine), ("stand-in", stand_in))
    }


def _logprobs(trainer: Scorer, batch: TokenBatch, *, precision: TrainerPrecision) -> Tensor:
    trainer.set_numerics(replace(trainer.numerics, trainer=precision))
    return live.logprobs(trainer, batch)


def expected_abs_d(trainer: Tensor, rollout: Tensor) -> float:
    """The mean of abs(trainer - rollout) over log-probabilities [..., V], weighted by the rollout's probability, in
    nats."""
    theirs = rollout.double()
    return float((theirs.exp() * (trainer.double() - theirs).abs()).sum(-1).mean())


def entropy(logits: Tensor) -> float:
    """The mean entropy of the softmax of [..., V], in nats."""
    logprobs = logits.double().log_softmax(-1)
    return float(-(logprobs.exp() * logprobs).sum(-1).mean())


def temperature_for(logits: Tensor) -> float:
    """The temperature at which logits have the mean entropy `ENTROPY`, found by halving."""
    low, high = -20.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if entropy(logits / 2**middle) > ENTROPY else (middle, high)
    return float(2**middle)


def _side(path: Path, layout: Layout, native: bool) -> Scorer:
    from fp8rl.trainer.scorer import Scorer

    numerics = _numerics("bf16", POW2, native)
    return Scorer(TrainerSpec(path, live.ONE_RANK, numerics, 0, 1, LENGTH), layout)


def _numerics(precision: TrainerPrecision, spec: str, native: bool) -> NumericsConfig:
    return replace(live.exact(spec, precision), mode="native" if native else "exact")


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


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    sizes = measurement.details["sizes"]
    return {f"abs_d_over_{axis}": _over(measurement, axis, sizes[axis]) for axis in sizes}


def _over(measurement: Measurement, axis: str, sizes: Sequence[float]) -> figures.Figure:
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
    claims=claims_of("model_scale"),
    measure=measure,
    seeds=5,
    draw=draw,
    tables=tables,
    units={
        "largest abs d": "nats",
        **{f"slope over {axis}": "(exponent)" for axis in ("parameters", "layers", "hidden", "experts", "top_k")},
    },
)
