"""Every FP8 product of a forward and backward: how far is each off, and do errors grow on their way?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab
from lab.studies.harness.products import (
    ROLES,
    Operands,
    Probe,
    ProductRecorder,
    Role,
    Take,
    in_fp22,
    in_fp32,
    library,
    promoted,
)
from lab.studies.harness.spoiled import with_ops
from lab.studies.harness.statistics import estimate
from lab.studies.harness.study import Measurement, Study, TextTable
from lab.studies.harness.subjects import MODEL, TRAIN, random_model

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

CHAINS, QUICK_CHAINS = 32, 16
MODELS = ("M", "N")
STEPS = (0, 1)
"""Updates before the trace."""
RATE = TrainerSection(lr=3e-4, warmup_steps=0)
SPEC = live.exact().spec
E5M2 = QuantSpec.preset("fp8_block_pow2").override(
    {role: {"format": "e5m2"} for role in ("weight", "activation", "gradient")}
)

QUANTIZATION, KERNEL = "quantization", "kernel"
"""What a series shows: fake-quantized products against BF16 ones, and an emulated kernel's against fake-quantized."""
SAME, GROWN = "same inputs", "through the network"
"""Its metrics, relative errors: of each product of the fake-quantized model for itself; and of what the product puts
out in a model all of whose products are taken so, from one batch, with experts chosen as in BF16."""


def arm(model: str, step: int, series: str, role: Role | None = None) -> str:
    """Its name; without a role, of all products."""
    return f"{model}, step {step}: {series}" + (f", {role}" if role else "")


SAID = "Fake-quantized products differ from BF16 ones two orders more than a kernel's from them"


def measure(lab: Lab) -> Measurement:
    """Each model's traces, by seed: other chains, and other weights of N."""
    lab.specs |= {"quantization": SPEC.digest(), "E5M2": E5M2.digest()}
    chains = QUICK_CHAINS if lab.quick else CHAINS
    jobs = [(model, seed, chains, lab.scratch) for seed in lab.seeds for model in MODELS]
    found = lab.each(_traces, jobs, "traces")
    values: dict[str, dict[str, list[float]]] = {}
    for traces, _ in found:
        for name, metrics in traces.items():
            for metric, number in metrics.items():
                values.setdefault(name, {}).setdefault(metric, []).append(number)
    shown = {name: one for _, drawn in found[: len(MODELS)] for name, one in drawn.items()}
    return Measurement(
        values=values,
        subject=f"M (2 layers, 1.0M parameters) and N (4 layers, 29M, random), {chains} chains, forward and backward",
        details={"traces": shown},
    )


Means = dict[str, dict[str, float]]
"""Numbers by arm and metric."""
Drawn = dict[str, dict[str, Any]]
"""The role of each product in the order of execution and its error by series and metric, by model and step."""


def _traces(model: str, seed: int, chains: int, scratch: Path) -> tuple[Means, Drawn]:
    path = MODEL if model == "M" else random_model(scratch, seed=seed)
    means: Means = {}
    drawn: Drawn = {}
    with live.world(RATE) as layout:
        trainer = live.trainer_of(path, live.exact(SPEC), layout, config=RATE, steps=len(STEPS))
        for step in STEPS:
            batch = _with_routes(trainer, live.chain_batch(TRAIN, seed * len(STEPS) + step, chains))
            plain, fake = _trace(trainer, batch, in_bf16), _trace(trainer, batch, fake_quantized, same_inputs)
            emulated = _trace(trainer, batch, in_promoted_fp22)
            grown = {QUANTIZATION: apart(fake.outputs, plain.outputs), KERNEL: apart(emulated.outputs, fake.outputs)}
            same = {series: [one[series] for one in fake.measured] for series in (QUANTIZATION, KERNEL)}
            means |= _means(model, step, trainer, fake, grown)
            drawn[f"{model}, step {step}"] = {"roles": fake.roles, SAME: same, GROWN: grown}
            if model == "N" and step == 0:
                again = _trace(trainer, batch, fake_quantized)
                means[arm(model, step, "again")] = {GROWN: fmean(apart(again.outputs, fake.outputs))}
                trainer.set_numerics(live.exact(E5M2))
                e5m2 = _trace(trainer, batch, fake_quantized, quantization_alone)
                means[arm(model, step, "E5M2")] = {SAME: fmean(one[QUANTIZATION] for one in e5m2.measured)}
                trainer.set_numerics(live.exact(SPEC))
            trainer.train_step(batch, SftObjective.of(batch))
    return means, drawn


def in_bf16(operands: Operands) -> Tensor:
    """The product of what came, not quantized."""
    return library(operands.a, operands.b)


def fake_quantized(operands: Operands) -> Tensor:
    """The BF16 product of quantized operands."""
    return library(operands.quantized_a, operands.quantized_b)


def in_promoted_fp22(operands: Operands) -> Tensor:
    """The emulated FP8 kernel's product, in FP32."""
    return promoted(operands.quantized_a, operands.quantized_b)


def same_inputs(operands: Operands) -> dict[str, float]:
    """Errors of a product, by series; before it is rounded to BF16 too, and with an FP22 sum throughout."""
    a, b = operands.quantized_a, operands.quantized_b
    fake, exact, kernel = fake_quantized(operands), in_fp32(a, b), in_promoted_fp22(operands)
    return quantization_alone(operands) | {
        KERNEL: relative_error(kernel.bfloat16(), fake),
        f"{QUANTIZATION}, unrounded": relative_error(exact, in_fp32(operands.a, operands.b)),
        f"{KERNEL}, unrounded": relative_error(kernel, exact),
        "FP22 alone, unrounded": relative_error(in_fp22(a, b), exact),
    }


def quantization_alone(operands: Operands) -> dict[str, float]:
    """The first of these."""
    return {QUANTIZATION: relative_error(fake_quantized(operands), in_bf16(operands))}


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over the reference's."""
    out, reference = out.detach().double(), reference.detach().double()
    return float((out - reference).norm() / reference.norm())


def apart(outputs: Sequence[Tensor], references: Sequence[Tensor]) -> list[float]:
    """The relative error of each product."""
    return [relative_error(out, reference) for out, reference in zip(outputs, references, strict=True)]


def _trace(trainer: Trainer, batch: TokenBatch, take: Take, probe: Probe | None = None) -> ProductRecorder:
    """All products of a forward and backward in which each goes on with what `take` gave."""
    recorder = ProductRecorder(take, probe)
    with with_ops(**recorder.ops()):
        trainer.forward_backward(batch, SftObjective.of(batch))
    return recorder


def _with_routes(trainer: Trainer, batch: TokenBatch) -> TokenBatch:
    """The batch with the experts that a BF16 forward chooses, for all to take: so that products have the same rows.

    The padding takes the first experts, as it would choose its own otherwise.
    """
    sizes = trainer.definition.sizes
    unknown = torch.full((*batch.tokens.shape, sizes.layers, sizes.top_k), UNKNOWN, dtype=torch.int16)
    with with_ops(**ProductRecorder(in_bf16).ops()):
        rows, scored = trainer.score_routed(replace(batch, routes=unknown))
    assert scored.routes is not None
    chosen = scored.routes[torch.tensor(rows).argsort()]
    first = torch.arange(sizes.top_k, dtype=torch.int16)
    return replace(batch, routes=torch.where(chosen == UNKNOWN, first, chosen), replay=True)


def _means(model: str, step: int, trainer: Trainer, fake: ProductRecorder, grown: dict[str, list[float]]) -> Means:
    """Mean errors of one trace by series, of all products and of each role."""
    from fp8rl.trainer.modules.weights import named_weights

    layers = trainer.model.decoder.layers
    layer_of = {weight.data_ptr(): index for index, layer in enumerate(layers) for _, weight in named_weights(layer)}
    where = [layer_of[weight.data_ptr()] for weight in fake.weights]
    means: Means = {}
    for series in (QUANTIZATION, KERNEL):
        same = [one[series] for one in fake.measured]
        unrounded = [one[f"{series}, unrounded"] for one in fake.measured]
        means[arm(model, step, series)] = {
            SAME: fmean(same),
            "unrounded": fmean(unrounded),
            GROWN: fmean(grown[series]),
        }
        for role in ROLES:
            mine = [index for index, found in enumerate(fake.roles) if found == role]
            of_layer = [fmean(grown[series][i] for i in mine if where[i] == at) for at in range(len(layers))]
            first, last = (of_layer[0], of_layer[-1]) if role == "fprop" else (of_layer[-1], of_layer[0])
            means[arm(model, step, series, role)] = {
                SAME: fmean(same[i] for i in mine),
                GROWN: fmean(grown[series][i] for i in mine),
                "last over first layer": last / first,
            }
    fp22 = fmean(one["FP22 alone, unrounded"] for one in fake.measured)
    return means | {arm(model, step, "FP22 alone"): {"unrounded": fp22}}


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    return {
        f"{trace.replace(', ', '_').replace(' ', '_')}": _figure(trace, drawn)
        for trace, drawn in measurement.details["traces"].items()
    }


def _figure(trace: str, drawn: Mapping[str, Any]) -> figures.Figure:
    figure = figures.figure(f"Errors of all quantized products in the order of execution: {trace}", rows=2, height=2.7)
    backward = drawn["roles"].index("dgrad")
    for axes, metric in zip(figure.axes, (SAME, GROWN), strict=True):
        for index, series in enumerate((QUANTIZATION, KERNEL)):
            shown = [(at, error) for at, error in enumerate(drawn[metric][series]) if error > 0]
            x, y = zip(*shown, strict=True)
            axes.scatter(x, y, s=5, color=figures.COLORS[index], label=SERIES[series])
        axes.axvline(backward - 0.5, color="#94a3b8", linewidth=0.8)
        axes.set(yscale="log", ylabel="relative error")
        axes.set_title(metric, fontsize=9, loc="left")
    figures.legend(figure.axes[0])
    figure.axes[1].set_xlabel("product; behind the line: the backward")
    return figure


SERIES = {QUANTIZATION: "fake-quantized against BF16", KERNEL: "emulated FP8 kernel against fake-quantized"}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    metrics = (SAME, "unrounded", GROWN, "last over first layer")
    rows = []
    for name, found in measurement.values.items():
        shown = [f"{estimate(found[metric], None, 'value').value:.3g}" if metric in found else "" for metric in metrics]
        rows.append([name, *shown])
    return [TextTable("Relative errors, means over the products", ("", *metrics), rows)]


STUDY = Study(
    name="gemm_trace",
    question="How far off is each FP8 product of a step, by quantization and by its kernel, and do errors grow?",
    seeds=5,
    claims=claims_of("gemm_trace"),
    measure=measure,
    draw=draw,
    tables=tables,
)
