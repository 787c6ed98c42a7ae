"""How fast one engine decodes: a step reads the weights that its answers use, and their keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from fp8rl.diagnose.plan.efficiency import Rates
from fp8rl.models.shape import Shape
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.budget.gpus import Gpu
from fp8rl.weight_sync.quantized import weight_bytes


@dataclass(frozen=True)
class Decode:
    """One decode step of an engine. seconds: of it; weights, cache: bytes read; batch: answers, a token each."""

    batch: int
    seconds: float
    weights: float
    cache: float

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def experts_read(experts: int, top_k: int, batch: int) -> float:
    """How many of a layer's experts some token of a batch takes, if each takes any as likely: E (1 - (1 - k/E)^B)."""
    return experts * (1 - (1 - top_k / experts) ** batch) if experts else 0.0


def decode_step(
    shape: Shape, spec: QuantSpec, gpu: Gpu, rates: Rates, batch: int, context: float, ranks: int = 1
) -> Decode:
    """Time of one decode step on an engine of `ranks` GPUs, launched as one CUDA graph.

    batch: answers at a time. context: tokens that each has so far.
    """
    sizes = shape.sizes
    read = experts_read(sizes.experts, sizes.top_k, batch) / sizes.experts if sizes.experts else 0.0
    weights = sum(
        weight_bytes(shape, weight, spec) * (read if weight.share == "experts" else 1.0)
        for weight in shape.weights
        if weight.place != "first"  # of which an answer takes a row; a tied one is read as the head
    )
    cache = batch * context * shape.kv_bytes()
    memory = (weights + cache) / ranks / (gpu.bandwidth * rates.bandwidth)
    fp8 = spec.quantized
    flops = 2.0 * shape.active_parameters * batch / ranks / (gpu.peak(fp8) * rates.product(sizes.moe, fp8))
    attention = batch * shape.attention_flops(context) / ranks / (gpu.bf16 * rates.attention)
    return Decode(batch, max(memory, flops + attention), weights, cache)
