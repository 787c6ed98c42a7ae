"""Calculates the least time of a training step at measured rates, and names the rates of each part.

A product takes its FLOPs at the measured rate. FP8 adds a pass over each operand that it quantizes. Activations that
are kept for the backward are written and read, and their gradients are written. The host launches one kernel after the
other, so a forward and backward take at least the time of all launches. Attention, transfers between GPUs and the waits
of pipeline stages have no measured rate, so the sum does not include them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8rl.diagnose.plan.bench import Decode, Rate, Rates, decode_step
from fp8rl.models.shape import WeightGroup, overlap
from fp8rl.numerics.config import Mode
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.rl.experiment.budget.memory import LOGIT_BYTES, master_bytes
from fp8rl.trainer.state_bytes import layers_of_stage

Ends = tuple[float, float]
"""Numbers at the fastest and at the slowest measured rates."""
ASSUMED = (
    "assumed: exact mode's kernels take as long beside their bytes as in the bench's layers; SGLang moves bytes as "
    "fast as the copy, and its kernels take as long as a node with next to nothing to do; TransformerEngine multiplies "
    "experts as fast as dense weights, and its launches take no time"
)
OPTIMIZER_BYTES = 30
"""Bytes that an update moves per parameter. Read: gradient, master, moments. Written: master, moments, weight."""
PASSES = 3
"""Passes over kept activations, in addition to the products: they are written and read, and their gradients written."""
OF_LAYER = {(True, True): (36, 15), (True, False): (31, 11), (False, True): (28, 14), (False, False): (17, 9)}
"""Launches of our kernels in a layer, by (in FP8, with experts): of its forward and backward, and of a second forward.
Counted on the meta device (`tests/trainer/test_launches.py`). Other families are assumed to have as many."""


@dataclass(frozen=True)
class Part:
    """A step, or a part of it."""

    name: str
    seconds: Ends | None
    """None: the bench lacks a rate."""
    rests_on: str
    """The rows of the bench that gave the rates, or what the bench lacks."""


@dataclass(frozen=True)
class StepTime:
    """The parts of one training step on the slowest pipeline stage."""

    parts: tuple[Part, ...]

    @property
    def total(self) -> Ends:
        """The least seconds of the step: the GPU's work, or all launches if they take longer."""

        def at(end: int) -> float:
            work = {part.name: part.seconds[end] for part in self.parts if part.seconds}
            launches, update = work.pop("launches", 0.0), work.pop("update", 0.0)
            return max(sum(work.values()), launches) + update

        return at(0), at(1)

    def whole(self, name: str) -> Part:
        """Return the step as one part, which has seconds if all its parts have."""
        lacking = [part for part in self.parts if part.seconds is None]
        rows = dict.fromkeys(row for part in lacking or self.parts for row in part.rests_on.split("; "))
        return Part(name, None if lacking else self.total, "; ".join(rows))


def step_time(job: Job, rates: Rates) -> StepTime:
    """Return the time of one optimizer step on the slowest stage."""
    return max((_of_stage(job, rates, stage) for stage in range(job.layout.pp)), key=lambda time: time.total)


def _of_stage(job: Job, rates: Rates, stage: int) -> StepTime:
    found, times = list(products(job, stage)), job.micro_batches

    def passes(name: str, size: float) -> Part:
        return _part(name, [(size, rates.copy)], "the copy of `quantizers`")

    def multiplied(name: str, experts: bool) -> Part:
        work = [
            (times * each.flops, rates.product(experts, fp8, gradient))
            for each in found
            if each.experts is experts
            for fp8, gradient in each.passes(job)
        ]
        return _part(name, work, "rows of `grouped`" if experts else "rows of `gemms`")

    quantized = sum(operand_bytes(job, each) for each in found if each.fp8)
    parts = [multiplied("products", experts=False)]
    parts += [multiplied("products of experts", experts=True)] if job.shape.sizes.moe else []
    parts += [passes("quantization", times * quantized)] if quantized else []
    parts.append(passes("activations", times * PASSES * kept_bytes(job, stage)))
    parts.append(passes("update", update_bytes(job, stage)))
    if job.storage == "kernels":
        parts.append(_part("launches", [(times * kernels(job, stage), rates.launches)], "`launch`"))
    return StepTime(tuple(parts))


def _part(name: str, work: Sequence[tuple[float, Rate | None]], what: str) -> Part:
    """Return a part of a step. work: amounts of work with their rates. what: the rows of the bench for these rates."""
    known = [(amount, rate) for amount, rate in work if rate is not None]
    if not work or len(known) < len(work):
        return Part(name, None, f"not in the bench: {what}")
    fast, slow = sum(amount / rate.high for amount, rate in known), sum(amount / rate.low for amount, rate in known)
    return Part(name, (fast, slow), "; ".join(dict.fromkeys(rate.rests_on for _, rate in known)))


def ratios(
    job: Job, bench: Mapping[Mode, Rates], decode: Iterable[tuple[Decode, Decode]], trained: StepTime
) -> Iterator[tuple[Part, Part]]:
    """Yield exact mode's time and a library's for each decode step and for the training step, if they are in FP8. No
    bench measures the libraries' steps, so theirs are least times (`ASSUMED`)."""
    exact, native, spec = bench["exact"], bench["native"], job.numerics.rollout_spec
    nodes = exact.nodes or Rate(math.inf, math.inf, "not in the bench: a node of `launch`, so kernels take no time")
    for ours, _ in decode if spec.quantized else ():
        stock = replace(ours, kernels=decode_step(job.shape, spec, ours.batch, ours.context, mode="native").kernels)
        answers = f"{ours.batch} answer{'s' * (ours.batch > 1)}"
        work = [(ours.bytes, exact.copy), (ours.kernels, exact.decode.get(ours.batch))]
        measured = _part(f"decoding {answers} ({ours.kernels} kernels)", work, f"`quantizers`, or {answers} of `graph`")
        work = [(stock.bytes, exact.copy), (stock.kernels, nodes)]
        yield measured, _part(f"stock SGLang ({stock.kernels} kernels), at most", work, "`quantizers`")
    if job.fp8:
        theirs = step_time(replace(job, storage="transformer_engine"), replace(native, fp8_experts=native.fp8_dense))
        yield trained.whole("training step"), theirs.whole("TransformerEngine")


def quotient(ours: Part, theirs: Part) -> Ends | None:
    """Divide the times of two parts, the smaller quotient first; None: one has none."""
    if ours.seconds is None or theirs.seconds is None:
        return None
    low, high = sorted(mine / other for mine, other in zip(ours.seconds, theirs.seconds, strict=True))
    return low, high


def kernels(job: Job, stage: int = 0) -> float:
    """Return the launches of our kernels in a micro-batch's forward and backward on a stage."""
    sizes, spec, again = job.shape.sizes, job.numerics.trainer_spec, job.layout.recompute == "layer"
    kinds = ((spec.of_layer(at, sizes.layers).quantized, sizes.has_experts(at)) for at in _layers(job, stage))
    return float(sum(sum(OF_LAYER[kind][: 1 + again]) for kind in kinds))


@dataclass(frozen=True)
class Product:
    """Products of x [rows, K] with `copies` weights [N, K] of a rank, in `layers` layers. The copies share the rows."""

    rows: float
    n: int
    k: int
    copies: int
    layers: int
    experts: bool
    fp8: bool
    repeated: bool
    """Whether the backward repeats the forward."""

    @property
    def flops(self) -> float:
        """FLOPs of one pass of `passes`, in all layers."""
        return 2.0 * self.rows * self.n * self.k * self.layers

    def passes(self, job: Job) -> tuple[tuple[bool, bool], ...]:
        """Return (is FP8, is the weight's gradient) for each forward, the input's gradient and the weight's gradient.

        With `fp8_forward` the gradients are in BF16. A weight with an adapter has no gradient. The adapter's products
        are left out, because they have few rows.
        """
        backward = self.fp8 and job.numerics.trainer == "fp8"
        forwards, gradients = (self.fp8, False), ((backward, False), (backward, True))
        return *(forwards,) * (1 + self.repeated), *gradients[: 1 if job.shape.adapters else 2]


def products(job: Job, stage: int) -> Iterator[Product]:
    """Yield the products of a micro-batch on a stage."""
    here, tp, recompute = _layers(job, stage), job.layout.tp, job.layout.recompute

    def twice(weight: WeightGroup) -> bool:
        """Return whether the backward repeats the product's forward."""
        if weight.place == "last":
            return job.rank_tokens > job.layout.head_chunk_tokens
        return recompute == "layer" or (recompute == "experts" and weight.place == "mlp")

    for weight in job.shape.weights:
        if not weight.taken or (weight.place == "last" and stage < job.layout.pp - 1):
            continue
        layers = len(overlap(weight.layers, here)) if weight.in_layers else 1
        fp8 = len(overlap(job.shape.quantized_layers(weight, job.numerics.trainer_spec), here))
        experts, split = weight.share == "experts", weight.share == "split"
        rows = job.rank_tokens / (1 if split else tp) * (weight.taken if experts else 1)
        copies = weight.copies // job.layout.ep if experts else 1
        for count, quantized in ((layers - fp8, False), (fp8, True)):
            if count:
                n = weight.rows // (tp if split else 1)
                yield Product(rows, n, weight.columns, copies, count, experts, quantized, twice(weight))


def operand_bytes(job: Job, each: Product) -> float:
    """Return the bytes that quantizing reads in BF16 and writes in FP8. Each forward quantizes the input; a backward
    the output's gradient and, if the weight has a gradient, both also along the tokens (the former with one read)."""
    x, dy = each.rows * each.k, each.rows * each.n
    backward = 3 * dy if job.shape.adapters else 3 * x + 4 * dy
    return each.layers * ((1 + each.repeated) * 3 * x + (backward if job.numerics.trainer == "fp8" else 0.0))


def kept_bytes(job: Job, stage: int) -> float:
    """Return the bytes that a micro-batch's forward keeps, including its logits."""
    kept = sum(job.shape.activations(layer).bf16 for layer in _layers(job, stage)) * job.rank_tokens / job.layout.tp
    last = stage == job.layout.pp - 1
    return kept + (LOGIT_BYTES * job.shape.sizes.vocab_size * job.rank_tokens if last else 0.0)


def update_bytes(job: Job, stage: int) -> float:
    """Return the bytes that the optimizer and the quantizing of each BF16 weight (both ways) move."""
    masters = master_bytes(job, stage * job.layout.stage_size)
    again = () if job.separate else products(job, stage)  # weights that stay are quantized once
    quantized = sum(each.layers * each.copies * each.n * each.k for each in again if each.fp8)
    return OPTIMIZER_BYTES * masters / 4 + 4 * quantized


def _layers(job: Job, stage: int) -> range:
    return layers_of_stage(job.shape.sizes.layers, job.layout.pp, stage)
