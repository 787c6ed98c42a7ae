"""How long a training step takes, as a sum of parts on the slowest pipeline stage.

A product takes as long as its FLOPs or its bytes, whichever is more; FP8 adds a pass over each operand that it
quantizes. Attention is BF16, its backward 2.5 forwards. Between those, what is kept is written, read, and its gradient
written. The host starts a kernel every 5 us, and a forward and backward are never faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8rl.diagnose.plan.efficiency import Rates
from fp8rl.diagnose.plan.transfers import layer_transfers, sums
from fp8rl.models.shape import WeightGroup, overlap
from fp8rl.rl.experiment.budget.gpus import Gpu
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.rl.experiment.budget.memory import LOGIT_BYTES
from fp8rl.trainer.config import OptimizerSection
from fp8rl.trainer.state_bytes import layers_of_stage, state_bytes

LAUNCH_S = 5e-6
OPTIMIZER_BYTES = 30
"""Read and written of one FP32 parameter: gradient, master and two moments read, three written, the weight written."""
BACKWARD_ATTENTION = 2.5
PASSES = 3
"""Over the activations that are kept, beside the products: written, read, their gradient written."""

_DENSE_KERNELS, _MOE_KERNELS = 15, 20
"""Launches of a layer's forward beside products of experts: norms, projections, rotation, attention, additions;
router, top-k, sorting, dispatch and combination. Counted in Megatron's modules; the backward has twice as many."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step.

    Attributes:
        products, quantization, attention, elementwise: of the slowest stage's micro-batches.
        launches: what the host takes to start all kernels; where that is more than these together, it counts for them.
        transfers: tensor, expert and data parallelism's, as far as nothing hides them.
        optimizer: the update, and making the quantized weights anew.
        bubble: the stage's wait for the others.
    """

    products: float
    quantization: float
    attention: float
    elementwise: float
    launches: float
    transfers: float
    optimizer: float
    bubble: float

    @property
    def work(self) -> float:
        """What the GPU computes in forwards and backwards."""
        return self.products + self.quantization + self.attention + self.elementwise

    @property
    def total(self) -> float:
        return max(self.work, self.launches) + self.transfers + self.optimizer + self.bubble

    @property
    def host_bound(self) -> bool:
        """Whether the host cannot start kernels fast enough."""
        return self.launches > self.work


def step_time(job: Job, gpu: Gpu, rates: Rates) -> StepTime:
    """The time of one optimizer step, on the stage that takes longest."""
    return max((_of_stage(job, gpu, rates, stage) for stage in range(job.layout.pp)), key=lambda time: time.total)


def _of_stage(job: Job, gpu: Gpu, rates: Rates, stage: int) -> StepTime:
    times, bandwidth = job.micro_batches, gpu.bandwidth * rates.bandwidth
    parts = list(_products(job, stage))
    products = sum(_product_seconds(job, gpu, rates, each) * each.again for each in parts)
    quantization = sum(_operand_bytes(job, each) * each.again for each in parts if each.fp8) / bandwidth
    layers = _layers(job, stage)
    share = len(layers) / job.shape.sizes.layers / job.layout.tp
    forward = job.shape.attention_flops(job.length / 2) * share * job.rank_tokens
    attention = (
        forward
        * (1 + (job.layout.recompute in ("attention", "layer")) + BACKWARD_ATTENTION)
        / (gpu.bf16 * rates.attention)
    )
    kept = sum(job.shape.activations(layer).bf16 for layer in layers) * job.rank_tokens / job.layout.tp
    logits = LOGIT_BYTES * job.shape.sizes.vocab_size * job.rank_tokens if stage == job.layout.pp - 1 else 0.0
    elementwise = PASSES * (kept + logits) / bandwidth
    launches = LAUNCH_S * (4 / 3 if job.layout.recompute == "layer" else 1.0) * kernels(job, stage)
    transfers = 0.0 if rates.hidden else layer_transfers(job, gpu, rates, layers)
    once = max(products + quantization + attention + elementwise, launches) + transfers
    return StepTime(
        products=times * products,
        quantization=times * quantization,
        attention=times * attention,
        elementwise=times * elementwise,
        launches=times * launches,
        transfers=times * transfers + (0.0 if rates.hidden else sums(job, gpu, rates, stage)),
        optimizer=_update(job, bandwidth, stage),
        bubble=(job.layout.pp - 1) * once,
    )


def kernels(job: Job, stage: int = 0) -> int:
    """Launches of a micro-batch's forward and backward on a stage, all of a layer's backward being twice its forward.

    TransformerEngine and cuBLAS take a product, and a quantization, of each expert by itself; the shared kernels take
    all experts at once. FP8 quantizes what comes in, in the forward, and what gradient comes back, in the backward.
    """
    sizes, own = job.shape.sizes, job.shape.sizes.experts // job.layout.ep
    grouped = 1 if job.storage == "kernels" else own
    total = 0
    for layer in _layers(job, stage):
        experts = sizes.has_experts(layer)
        total += 3 * (_DENSE_KERNELS + (_MOE_KERNELS + 2 * grouped if experts else 3))
        if job.numerics.trainer_spec.of_layer(layer, sizes.layers).quantized:
            total += 2 * (2 + (2 * grouped if experts else 2))
    return total


@dataclass(frozen=True)
class _Product:
    """x [rows, K] with `copies` weights [N, K] of one rank, in `layers` layers; the rows are shared by the copies.

    again: 4/3 where the backward takes the forward once more, else 1; it is as long as two forwards.
    """

    rows: float
    n: int
    k: int
    copies: int
    layers: int
    experts: bool
    fp8: bool
    again: float


def _products(job: Job, stage: int) -> Iterator[_Product]:
    here = _layers(job, stage)
    for weight in job.shape.weights:
        if not weight.taken or (weight.place == "last" and stage < job.layout.pp - 1):
            continue
        layers = len(overlap(weight.layers, here)) if weight.place == "layers" else 1
        fp8 = len(overlap(job.shape.quantized_layers(weight, job.numerics.trainer_spec), here))
        for count, quantized in ((layers - fp8, False), (fp8, True)):
            if count:
                yield _product(job, weight, count, quantized)


def _product(job: Job, weight: WeightGroup, layers: int, fp8: bool) -> _Product:
    tp, experts, again = job.layout.tp, weight.share == "experts", 4 / 3 if _twice(job, weight) else 1.0
    if experts:  # the tokens of all ranks, taken k times, on the experts of all ranks
        rows, n, k = job.rank_tokens / tp * weight.taken, weight.rows, weight.columns
        return _Product(rows, n, k, weight.copies // job.layout.ep, layers, experts, fp8, again)
    rows = job.rank_tokens if weight.share == "split" else job.rank_tokens / tp
    parts = tp if weight.share == "split" else 1
    return _Product(rows, weight.rows // parts, weight.columns, 1, layers, experts, fp8, again)


def _twice(job: Job, weight: WeightGroup) -> bool:
    """Whether the trainer computes a product's forward in the backward as well."""
    if weight.place == "last":
        return job.rank_tokens > job.layout.head_chunk_tokens
    inside = weight.name == "router" or weight.name.startswith(("experts", "mlp", "shared"))
    return job.layout.recompute == "layer" or (job.layout.recompute == "experts" and inside)


def _product_seconds(job: Job, gpu: Gpu, rates: Rates, each: _Product) -> float:
    """Forward, gradient of the input, gradient of the weight. With `fp8_forward` the last two are BF16's. A weight that
    has an adapter beside it has no gradient; the adapter's own products, of few rows, are left out."""
    backward = each.fp8 and job.numerics.trainer == "fp8"
    fp8_of = (each.fp8, backward, backward)[: 2 if job.shape.adapters else 3]
    flops = 2.0 * each.rows * each.n * each.k
    return each.layers * sum(
        max(
            flops / (gpu.peak(fp8) * rates.product(each.experts, fp8)),
            _product_bytes(each, fp8) / (gpu.bandwidth * rates.bandwidth),
        )
        for fp8 in fp8_of
    )


def _product_bytes(each: _Product, fp8: bool) -> float:
    """Two operands read, the result written in BF16."""
    read = each.rows * each.k + each.copies * each.n * each.k
    return (1 if fp8 else 2) * read + 2 * each.rows * each.n


def _operand_bytes(job: Job, each: _Product) -> float:
    """Read in BF16 and written in FP8: the input along its features (forward) and along the tokens (for the weight's
    gradient), the output's gradient both ways at once."""
    backward = 3 * each.rows * each.k + 4 * each.rows * each.n if job.numerics.trainer == "fp8" else 0.0
    return each.layers * (3 * each.rows * each.k + backward)


def product_bytes(job: Job) -> float:
    """Moved by the products of a step on the first stage, and by the passes that quantize their operands."""
    total = 0.0
    for each in _products(job, 0):
        backward = each.fp8 and job.numerics.trainer == "fp8"
        moved = sum(each.layers * _product_bytes(each, fp8) for fp8 in (each.fp8, backward, backward))
        total += moved + (_operand_bytes(job, each) if each.fp8 else 0.0)
    return job.micro_batches * total


def _update(job: Job, bandwidth: float, stage: int) -> float:
    """Seconds of the optimizer, and of quantizing each weight from BF16 into codes both ways."""
    rank = stage * job.layout.stage_size
    on_gpu = job.layout.model_copy(update={"optimizer": OptimizerSection()})
    states = state_bytes(job.shape, on_gpu, job.numerics, job.storage, rank).values()
    again = () if job.separate else _products(job, stage)  # weights that stay are quantized once
    quantized = sum(each.layers * each.copies * each.n * each.k for each in again if each.fp8)
    return (OPTIMIZER_BYTES * sum(state.masters / 4 for state in states) + 4 * quantized) / bandwidth


def _layers(job: Job, stage: int) -> range:
    return layers_of_stage(job.shape.sizes.layers, job.layout.pp, stage)
