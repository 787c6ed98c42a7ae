"""Times of training and decoding that the documents' claims need, from published peaks and assumed efficiencies.

Nobody knows one efficiency, so there are two corners: everything slow and no transfer hidden behind products;
everything fast and all of them hidden. A step is expected between them. `fp8rl plan` counts the FLOPs and bytes; it
takes no rate that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8rl.diagnose.plan.bench import Decode
from fp8rl.diagnose.plan.time import PASSES, Product, kept_bytes, operand_bytes, products, update_bytes
from fp8rl.rl.experiment.budget.job import GPUS_PER_NODE, Job
from fp8rl.trainer.state_bytes import layers_of_stage, state_bytes

BACKWARD_ATTENTION = 2.5
_DENSE_KERNELS, _MOE_KERNELS = 15, 20
"""The libraries' launches of a layer's forward beside products of experts; the backward has twice as many. Counted in
Megatron's modules."""


@dataclass(frozen=True)
class Peaks:
    """Published rates of a GPU: dense FLOP/s, bytes/s of memory, and bytes/s that it sends over NVLink and over a
    network of 400 Gbit/s."""

    bandwidth: float
    bf16: float
    fp8: float
    nvlink: float
    network: float = 50e9

    def peak(self, fp8: bool) -> float:
        return self.fp8 if fp8 else self.bf16


PEAKS = {
    "h100": Peaks(3.35e12, 989e12, 1979e12, 450e9),
    "h200": Peaks(4.8e12, 989e12, 1979e12, 450e9),
    "h800": Peaks(3.35e12, 989e12, 1979e12, 200e9),
}
"""From NVIDIA's data sheets; an H800 is an H100 with less than half of its NVLink."""


@dataclass(frozen=True)
class Rates:
    """One corner: parts of a GPU's rates, of BF16 and FP8 products, dense and experts', of attention (of BF16's peak),
    of memory and of links; launches: kernels that a host starts in a second; hidden: transfers go on beside
    products."""

    dense: float
    experts: float
    fp8_dense: float
    fp8_experts: float
    attention: float
    bandwidth: float
    link: float
    launches: float
    hidden: bool

    def product(self, experts: bool, fp8: bool) -> float:
        if fp8:
            return self.fp8_experts if experts else self.fp8_dense
        return self.experts if experts else self.dense


SLOW = Rates(0.60, 0.30, 0.36, 0.165, 0.35, 0.60, 0.50, 1e6 / 5, hidden=False)
FAST = Rates(0.80, 0.70, 0.68, 0.60, 0.75, 0.90, 0.90, 1e6 / 5, hidden=True)
"""Assumed, before this project had measured a GPU: BF16 products 0.6-0.8 of the peak, of experts 0.3-0.7; FP8's 1.2-1.7
times as fast, of experts 1.1-1.7 (DeepGEMM publishes 1.1-1.36 PFLOP/s on H800, the top of it); attention 0.35-0.75
(FlashAttention-2 and -3 on H100); memory 0.6-0.9; links 0.5-0.9; 5 us a launch."""


@dataclass(frozen=True)
class Bracket:
    """A number at both corners."""

    slow: float
    fast: float

    @property
    def low(self) -> float:
        return min(self.slow, self.fast)

    @property
    def high(self) -> float:
        return max(self.slow, self.fast)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def fp8_over_bf16(job: Job, gpu: Peaks) -> Bracket:
    """Time of a training step in FP8 over the same in BF16; below 1 where FP8 is faster."""
    return Bracket(*(step_time(job, gpu, at).total / step_time(job.in_bf16(), gpu, at).total for at in (SLOW, FAST)))


def read_seconds(step: Decode, gpu: Peaks, rates: Rates) -> float:
    """Time in which a decode step reads its weights and its cache."""
    return (step.weights + step.cache) / step.ranks / (gpu.bandwidth * rates.bandwidth)


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


def step_time(job: Job, gpu: Peaks, rates: Rates) -> StepTime:
    """The time of one optimizer step, on the stage that takes longest."""
    return max((_of_stage(job, gpu, rates, stage) for stage in range(job.layout.pp)), key=lambda time: time.total)


def _of_stage(job: Job, gpu: Peaks, rates: Rates, stage: int) -> StepTime:
    times, bandwidth = job.micro_batches, gpu.bandwidth * rates.bandwidth
    parts = list(products(job, stage))
    multiplied = sum(_product_seconds(job, gpu, rates, each) for each in parts)
    quantization = sum(operand_bytes(job, each) for each in parts if each.fp8) / bandwidth
    layers = _layers(job, stage)
    share = len(layers) / job.shape.sizes.layers / job.layout.tp
    forward = job.shape.attention_flops(job.length / 2) * share * job.rank_tokens
    forwards = 1 + (job.layout.recompute in ("attention", "layer")) + BACKWARD_ATTENTION
    attention = forward * forwards / (gpu.bf16 * rates.attention)
    elementwise = PASSES * kept_bytes(job, stage) / bandwidth
    launches = kernels(job, stage) / rates.launches
    transfers = 0.0 if rates.hidden else layer_transfers(job, gpu, rates, layers)
    once = max(multiplied + quantization + attention + elementwise, launches) + transfers
    return StepTime(
        products=times * multiplied,
        quantization=times * quantization,
        attention=times * attention,
        elementwise=times * elementwise,
        launches=times * launches,
        transfers=times * transfers + (0.0 if rates.hidden else sums(job, gpu, rates, stage)),
        optimizer=update_bytes(job, stage) / bandwidth,
        bubble=(job.layout.pp - 1) * once,
    )


def kernels(job: Job, stage: int = 0) -> float:
    """The libraries' launches of a micro-batch's forward and backward on a stage: they take a product, and a
    quantization, of each expert by itself."""
    sizes, own, again = job.shape.sizes, job.shape.sizes.experts // job.layout.ep, job.layout.recompute == "layer"
    total = 0.0
    for layer in _layers(job, stage):
        experts, fp8 = sizes.has_experts(layer), job.numerics.trainer_spec.of_layer(layer, sizes.layers).quantized
        once = 3 * (_DENSE_KERNELS + (_MOE_KERNELS + 2 * own if experts else 3))
        total += (4 / 3 if again else 1) * (once + fp8 * 2 * (2 + (2 * own if experts else 2)))
    return total


def _product_seconds(job: Job, gpu: Peaks, rates: Rates, each: Product) -> float:
    """The longer of its FLOPs and its bytes, for each forward and both gradients."""
    return sum(
        max(
            each.flops / (gpu.peak(fp8) * rates.product(each.experts, fp8)),
            each.layers * _product_bytes(each, fp8) / (gpu.bandwidth * rates.bandwidth),
        )
        for fp8, _ in each.passes(job)
    )


def _product_bytes(each: Product, fp8: bool) -> float:
    """Two operands read, the result written in BF16."""
    read = each.rows * each.k + each.copies * each.n * each.k
    return (1 if fp8 else 2) * read + 2 * each.rows * each.n


def product_bytes(job: Job) -> float:
    """Moved by the products of a step on the first stage, and by the passes that quantize their operands."""
    total = 0.0
    for each in products(job, 0):
        backward = each.fp8 and job.numerics.trainer == "fp8"
        moved = sum(each.layers * _product_bytes(each, fp8) for fp8 in (each.fp8, backward, backward))
        total += moved + (operand_bytes(job, each) if each.fp8 else 0.0)
    return job.micro_batches * total


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


def layer_transfers(job: Job, gpu: Peaks, rates: Rates, layers: range) -> float:
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


def sums(job: Job, gpu: Peaks, rates: Rates, stage: int) -> float:
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


def _per_byte(ranks: int, apart: int, gpu: Peaks, rates: Rates) -> float:
    """Seconds per byte that a rank exchanges evenly with `ranks`, itself among them, which are `apart` in order."""
    near = max(1, min(ranks, GPUS_PER_NODE // apart))
    return ((near - 1) / ranks / gpu.nvlink + (ranks - near) / ranks / gpu.network) / rates.link
