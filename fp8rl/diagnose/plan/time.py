"""The time of a training step, as a sum of parts on the slowest pipeline stage.

A product takes as long as its FLOPs or its bytes, whichever is more; FP8 adds a pass over each operand that it
quantizes. Attention is BF16, its backward 2.5 forwards. Between those, what is kept is written, read, and its gradient
written. The host launches one kernel after the other, and a forward and backward are never faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8rl.diagnose.plan.efficiency import Rates
from fp8rl.models.shape import WeightGroup, overlap
from fp8rl.rl.experiment.budget.gpus import GPUS_PER_NODE, Gpu
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.rl.experiment.budget.memory import LOGIT_BYTES
from fp8rl.trainer.config import OptimizerSection
from fp8rl.trainer.state_bytes import layers_of_stage, state_bytes

OPTIMIZER_BYTES = 30
"""Read and written of one FP32 parameter: gradient, master and two moments read, three written, the weight written."""
BACKWARD_ATTENTION = 2.5
PASSES = 3
"""Over the activations that are kept, beside the products: written, read, their gradient written."""

OF_LAYER = {(True, True): (49, 20), (True, False): (41, 14), (False, True): (34, 19), (False, False): (21, 12)}
"""Launches of our kernels in a layer that is FP8's or not, with experts or dense: of its forward and backward, and of a
second forward. Counted on the meta device (`tests/trainer/test_launches.py`); other families' are taken as many."""
_DENSE_KERNELS, _MOE_KERNELS = 15, 20
"""The libraries' launches of a layer's forward beside products of experts; the backward has twice as many. Counted in
Megatron's modules."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step, on the slowest stage."""

    products: float
    quantization: float
    attention: float
    elementwise: float
    launches: float
    """Of the host, to start all kernels; where that is more than the four above together, it counts for them."""
    transfers: float
    """Of tensor, expert and data parallelism, as far as nothing hides them."""
    optimizer: float
    """Of the update, and of making the quantized weights anew."""
    bubble: float
    """The stage's wait for the others."""

    @property
    def work(self) -> float:
        """Seconds that the GPU computes in forwards and backwards."""
        return self.products + self.quantization + self.attention + self.elementwise

    @property
    def total(self) -> float:
        return max(self.work, self.launches) + self.transfers + self.optimizer + self.bubble

    @property
    def host_bound(self) -> bool:
        """The host cannot start kernels fast enough."""
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
    forward = job.shape.attention_flops(job.mean_keys) * share * job.rank_tokens
    forwards = 1 + (job.layout.recompute in ("attention", "layer")) + BACKWARD_ATTENTION
    attention = forward * forwards / (gpu.bf16 * rates.attention)
    kept = sum(job.shape.activations(layer).bf16 for layer in layers) * job.rank_tokens / job.layout.tp
    logits = LOGIT_BYTES * job.shape.sizes.vocab_size * job.rank_tokens if stage == job.layout.pp - 1 else 0.0
    elementwise = PASSES * (kept + logits) / bandwidth
    launches = kernels(job, stage) / rates.launches
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


def kernels(job: Job, stage: int = 0) -> float:
    """Launches of a micro-batch's forward and backward on a stage: of our kernels, whose measured time contains
    torch's launches between them; or of the libraries', which take a product, and a quantization, of each expert by
    itself."""
    sizes, own, again = job.shape.sizes, job.shape.sizes.experts // job.layout.ep, job.layout.recompute == "layer"
    total = 0.0
    for layer in _layers(job, stage):
        experts, fp8 = sizes.has_experts(layer), job.numerics.trainer_spec.of_layer(layer, sizes.layers).quantized
        if job.storage == "kernels":
            total += sum(OF_LAYER[fp8, experts][: 1 + again])
        else:
            once = 3 * (_DENSE_KERNELS + (_MOE_KERNELS + 2 * own if experts else 3))
            total += (4 / 3 if again else 1) * (once + fp8 * 2 * (2 + (2 * own if experts else 2)))
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
        layers = len(overlap(weight.layers, here)) if weight.in_layers else 1
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
    """Return whether the trainer computes a product's forward in the backward as well."""
    if weight.place == "last":
        return job.rank_tokens > job.layout.head_chunk_tokens
    inside = weight.place == "mlp"
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


# What ranks send each other in a step: tokens to experts, parts of a sequence, gradients and weights.

GRADIENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "e4m3": 1 + 4 / 128, "e5m2": 1 + 4 / 128}
"""Bytes of a number on its way to be summed, by `trainer.gradient_wire`."""


def expert_bytes(job: Job, stage: int = 0) -> float:
    """Bytes that a rank sends in a step to other ranks' experts, and back: forward and backward."""
    ep = job.layout.ep
    return job.micro_batches * _expert_bytes(job, _layers(job, stage)) * (ep - 1) / ep


def gathered_and_summed_bytes(job: Job, stage: int = 0) -> tuple[float, float]:
    """Bytes that a rank sends in a step to gather weights, and to sum FP32 gradients, dense and experts'."""
    gathered = summed = 0.0
    for elements, ranks, _, gather in _shared(job, stage):
        gathered += elements * gather * (ranks - 1) / ranks
        summed += elements * GRADIENT_BYTES[job.layout.gradient_wire] * (ranks - 1) / ranks
    return gathered, summed


def layer_transfers(job: Job, gpu: Gpu, rates: Rates, layers: range) -> float:
    """Seconds of a micro-batch's transfers in these layers: sequence-parallel gathers and sums, tokens to experts."""
    sizes, layout = job.shape.sizes, job.layout
    moe = sum(sizes.has_experts(layer) for layer in layers)
    token = 2.0 * sizes.hidden_size * job.rank_tokens
    seconds = 0.0
    if layout.tp > 1:  # forward: gathered and summed; backward: likewise, and gathered once more for the weights
        blocks = 2 * len(layers) - moe
        seconds += 5 * blocks * token * (layout.tp - 1) / layout.tp / (gpu.nvlink * rates.link)
    if layout.cp > 1:  # keys and values, once more in the backward, where queries and their gradient come too
        forwards = 1 + (layout.recompute in ("attention", "layer"))
        gathered = 4.0 * (sizes.heads + (1 + forwards) * sizes.kv_heads) * sizes.head_dim
        seconds += len(layers) * gathered * job.micro_batch / layout.tp * _per_byte(layout.cp, layout.tp, gpu, rates)
    if layout.ep > 1:  # there and back, forward and backward
        seconds += _expert_bytes(job, layers) * _per_byte(layout.ep, 1, gpu, rates)
    return seconds


def _expert_bytes(job: Job, layers: range) -> float:
    """Bytes of one micro-batch's tokens to experts and back, forward and backward, those of a rank to itself among
    them."""
    sizes = job.shape.sizes
    moe = sum(sizes.has_experts(layer) for layer in layers)
    return 4.0 * moe * sizes.top_k * 2 * sizes.hidden_size * job.rank_tokens / job.layout.tp


def sums(job: Job, gpu: Gpu, rates: Rates, stage: int) -> float:
    """Seconds of the gradients' sum (FP32) and the weights' gather over ranks that hold the same."""
    return sum(
        elements * (GRADIENT_BYTES[job.layout.gradient_wire] + gather) * _per_byte(ranks, apart, gpu, rates)
        for elements, ranks, apart, gather in _shared(job, stage)
    )


def _shared(job: Job, stage: int) -> Iterator[tuple[float, int, int, float]]:
    """Elements of a rank's dense weights, and of its experts: with how many ranks it shares them, how far apart these
    are, and in how many bytes one is gathered."""
    layout = job.layout
    states = state_bytes(job.shape, layout, job.numerics, job.storage, stage * layout.stage_size)
    yield states["dense"].gradients / 4, layout.copies, layout.tp, _gathered_bytes(job, experts=False)
    experts = layout.stage_size // layout.ep
    yield states["experts"].gradients / 4, experts, layout.ep, _gathered_bytes(job, experts=True)


def _gathered_bytes(job: Job, experts: bool) -> float:
    """Bytes of a gathered element: 2, or 1 where weights that FP8 products take are held in FP8, or gathered so."""
    if job.storage != "transformer_engine" and job.layout.weight_gather == "bf16":
        return 2.0
    spec = job.numerics.trainer_spec
    mine = [weight for weight in job.shape.weights if (weight.share == "experts") is experts]
    fp8 = sum(weight.size * weight.copies * len(job.shape.quantized_layers(weight, spec)) for weight in mine)
    return 2 - fp8 / max(1, sum(weight.size * weight.count for weight in mine))


def _per_byte(ranks: int, apart: int, gpu: Gpu, rates: Rates) -> float:
    """Seconds per byte that a rank exchanges evenly with `ranks`, itself among them, which are `apart` in order."""
    near = max(1, min(ranks, GPUS_PER_NODE // apart))
    return ((near - 1) / ranks / gpu.nvlink + (ranks - near) / ranks / gpu.network) / rates.link
