"""What ranks send each other in a step: tokens to experts, parts of a sequence, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl.diagnose.plan.efficiency import Rates
from fp8rl.rl.experiment.budget.gpus import GPUS_PER_NODE, Gpu
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.trainer.state_bytes import layers_of_stage, state_bytes

GRADIENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "e4m3": 1 + 4 / 128, "e5m2": 1 + 4 / 128}
"""Bytes of a number on its way to be summed, by `trainer.gradient_wire`."""


def expert_bytes(job: Job, stage: int = 0) -> float:
    """That a rank sends in a step to other ranks' experts, and back: forward and backward."""
    return (
        job.micro_batches
        * _expert_bytes(job, layers_of_stage(job.shape.sizes.layers, job.layout.pp, stage))
        * (job.layout.ep - 1)
        / job.layout.ep
    )


def gathered_and_summed_bytes(job: Job, stage: int = 0) -> tuple[float, float]:
    """That a rank sends in a step to gather weights, and to sum FP32 gradients, dense and experts'."""
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
        gathered = (
            4.0 * (sizes.heads + (2 + (layout.recompute in ("attention", "layer"))) * sizes.kv_heads) * sizes.head_dim
        )
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
