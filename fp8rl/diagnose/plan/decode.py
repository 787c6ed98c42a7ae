"""What a decode step of one engine reads and launches; with measured rates, the least time that this takes."""

from __future__ import annotations

from dataclasses import dataclass

from fp8rl.diagnose.plan.bench import Rate
from fp8rl.models.shape import BF16_BYTES, Shape
from fp8rl.numerics.config import Mode
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.served import weight_bytes

OF_LAYER: dict[tuple[Mode, bool], tuple[int, int]] = {
    ("exact", True): (12, 15),
    ("exact", False): (10, 24),
    ("native", True): (15, 19),
    ("native", False): (11, 15),
}
"""Kernels of a dense layer and of one with experts, by mode and whether products are FP8: ours as they are counted for
64 answers of Qwen3-8B and Qwen3-30B-A3B by the test of the plugin's launches, with one of SGLang's that writes the
cache of a dense layer; SGLang's own by reading 0.5.19. Layers of another architecture are taken to have as many."""
BESIDE_LAYERS = 14
"""Embedding, last norm, head, truncation, draw and log-probabilities."""


@dataclass(frozen=True)
class Decode:
    """One decode step of an engine."""

    batch: int
    """Answers, a token each."""
    kernels: int
    """Kernels of its CUDA graph."""
    weights: float
    """Bytes of the weights that it reads."""
    cache: float
    """Bytes of keys, values and states."""
    ranks: int = 1

    def seconds(self, copy: Rate, nodes: Rate) -> tuple[float, float]:
        """The least time of reading and of the kernels' begins and ends, at the fastest and slowest measured rates."""
        size = (self.weights + self.cache) / self.ranks
        return size / copy.high + self.kernels / nodes.high, size / copy.low + self.kernels / nodes.low


def decode_step(
    shape: Shape, spec: QuantSpec, batch: int, context: float, ranks: int = 1, mode: Mode = "exact",
    each: int = BF16_BYTES,
) -> Decode:  # fmt: skip
    """What one decode step reads on an engine of `ranks` GPUs.

    batch: answers at a time. context: tokens that each has so far. each: bytes of a number in the cache.
    """
    sizes = shape.sizes
    read = experts_read(sizes.experts, sizes.top_k, batch) / sizes.experts if sizes.experts else 0.0
    weights = sum(
        weight_bytes(shape, weight, spec) * (read if weight.share == "experts" else 1.0)
        for weight in shape.weights
        if weight.place != "first"  # of which an answer takes a row; a tied one is read as the head
    )
    cache = batch * (context * shape.kv_bytes(each) + 2 * shape.request_bytes())  # a state is read and written
    return Decode(batch, decode_kernels(shape, spec, mode), weights, cache, ranks)


def decode_kernels(shape: Shape, spec: QuantSpec, mode: Mode) -> int:
    """Kernels of a decode step."""
    of_layer = OF_LAYER[mode, spec.quantized]
    return BESIDE_LAYERS + sum(of_layer[shape.sizes.has_experts(layer)] for layer in range(shape.sizes.layers))


def experts_read(experts: int, top_k: int, batch: int) -> float:
    """Expected number of a layer's experts that a batch takes, if each takes any as likely: E (1 - (1 - k/E)^B)."""
    return experts * (1 - (1 - top_k / experts) ** batch) if experts else 0.0
