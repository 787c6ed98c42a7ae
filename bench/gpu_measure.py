"""Sizes and times of the GPU benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.measure import Result


@dataclass(frozen=True)
class Shape:
    """A product of T tokens with a weight [n, k]. Of experts, with `experts` weights and `top_k` of them per token."""

    name: str
    n: int
    k: int
    experts: int = 0
    top_k: int = 1


@dataclass(frozen=True)
class Layers:
    """A stack of MoE layers, in the words of an HF config."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    moe_intermediate: int
    vocab: int


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    tokens: rows of the products. quantized: (tokens, features) of the quantizers. stack: what is trained and synced;
    exact: what is run as trainer and as engine; batch, length: sequences of a training step.
    """

    dense: tuple[Shape, ...]
    experts: tuple[Shape, ...]
    tokens: tuple[int, ...]
    quantized: tuple[tuple[int, int], ...]
    stack: Layers
    exact: Layers
    batch: int
    length: int

    @classmethod
    def real(cls) -> Sizes:
        """Qwen3-30B-A3B and DeepSeek-V3; of the latter's 256 experts, the 32 of one rank of 8."""
        qwen = Layers(4, 2048, 32, 4, 128, 8, 768, 4096)  # a small vocabulary: it is the layers that are measured
        return cls(
            dense=(
                Shape("Qwen3-30B-A3B qkv", 5120, 2048),
                Shape("Qwen3-30B-A3B o", 2048, 4096),
                Shape("DeepSeek-V3 q_b", 24576, 1536),
                Shape("DeepSeek-V3 o", 7168, 16384),
                Shape("DeepSeek-V3 dense gate_up", 36864, 7168),
            ),
            experts=(
                Shape("Qwen3-30B-A3B gate_up", 1536, 2048, 128, 8),
                Shape("Qwen3-30B-A3B down", 2048, 768, 128, 8),
                Shape("DeepSeek-V3 gate_up", 4096, 7168, 32, 1),
                Shape("DeepSeek-V3 down", 7168, 2048, 32, 1),
            ),
            tokens=(16, 128, 1024, 4096, 16384),
            quantized=((16384, 2048), (16384, 7168)),
            stack=qwen,
            exact=Layers(2, 2048, 32, 4, 16, 8, 768, 4096),
            batch=4,
            length=4096,
        )

    @classmethod
    def tiny(cls) -> Sizes:
        """Every part in seconds under the interpreter."""
        small = Layers(1, 128, 2, 1, 4, 2, 128, 64)
        return cls(
            dense=(Shape("dense", 128, 256),),
            experts=(Shape("experts", 128, 128, 3, 2),),
            tokens=(16,),
            quantized=((16, 256),),
            stack=small,
            exact=small,
            batch=2,
            length=16,
        )


@dataclass
class Measured:
    """What one part of the GPU bench found.

    results: judged by a bar. rows: the table behind them. left_out: what could not be measured, and why.
    """

    results: list[Result] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


class Stopwatch:
    """Times functions on a device: medians, with a cold L2 cache on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def seconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Median time of one call, after warming up."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(3):
            run()
        cold = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            cold.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3

    def side_by_side(self, sides: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
        """Median of each side over rounds in which they take turns."""
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 if self.device.type == "cpu" else rounds):
            for name, run in sides.items():
                times[name].append(self.seconds(run, repeats=8))
        return {name: statistics.median(values) for name, values in times.items()}

    def copy_bandwidth(self) -> float:
        """Bytes per second of a device-to-device copy of a gigabyte, read and written bytes counted."""
        source = torch.empty(
            (1 << 30) if self.device.type == "cuda" else (1 << 16), dtype=torch.uint8, device=self.device
        )
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda: target.copy_(source))


def random(*shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """BF16 normal numbers; never zeros, which GPUs multiply faster."""
    return (torch.randn(shape, device=device, dtype=torch.float32) * scale).bfloat16()
