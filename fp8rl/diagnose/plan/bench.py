"""Reads the rates of a GPU that `python -m lab.bench.gpu` measured, and calculates a decode step.

A missing rate is not replaced by an assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8rl.models.shape import BF16_BYTES, Shape
from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.reading import parsed
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.served import weight_bytes

LARGE = 4096
"""The bench's rows with fewer tokens do not count, because small products are bound by memory."""
DECODED = (1, 64, 256)
"""Batch sizes (answers at a time) for which decoding is calculated."""


@dataclass(frozen=True)
class Rate:
    """How much a GPU or its host does in a second: FLOPs, bytes, launches or kernels."""

    low: float
    high: float
    rests_on: str
    """The rows of the bench that gave the rate, as text for a reader."""


@dataclass(frozen=True)
class Rates:
    """The measured rates that a plan can use; None: the file does not have that rate."""

    source: str
    """The file and its GPU."""
    dense: Rate | None
    """FLOP/s of BF16 products."""
    experts: Rate | None
    copy: Rate | None
    """Bytes/s of memory. Bytes read and bytes written both count."""
    fp8_dense: Rate | None
    """FLOP/s of FP8 products in the mode of the spec, without quantizing their operands."""
    fp8_experts: Rate | None = None
    fp8_gradient: Rate | None = None
    """FLOP/s of the gradient of experts' weights in FP8."""
    launches: Rate | None = None
    """Kernels that the host launches in a second, outside CUDA graphs."""
    nodes: Rate | None = None
    """Kernels of a CUDA graph in a second, with next to nothing to do."""
    decode: Mapping[int, Rate | None] = field(default_factory=dict)
    """Kernels of an exact FP8 decode step in a second, beside its bytes at `copy`, by number of answers."""

    def product(self, experts: bool, fp8: bool, gradient: bool = False) -> Rate | None:
        """Return the rate of one product. gradient: it computes a weight's gradient."""
        if experts and fp8 and gradient and self.fp8_gradient:
            return self.fp8_gradient
        if fp8:
            return self.fp8_experts if experts else self.fp8_dense
        return self.experts if experts else self.dense


def read_bench(path: Path) -> dict[Mode, Rates]:
    """Read the rates of each mode from a `gpu.json`. Raises UserError: the file is no such report, or has no rate."""
    remedy = "Make one with `python -m lab.bench.gpu graph gemms grouped quantizers launch` on such a GPU."
    return parsed(path, "--bench", lambda report: _rates(report, path, remedy), remedy)


def _rates(report: Mapping[str, Any], path: Path, remedy: str) -> dict[Mode, Rates]:
    rows, device = report["rows"], str(report["machine"]["device"])

    def rate(part: str, what: str, of_row: Callable[[Mapping[str, Any]], float | None]) -> Rate | None:
        values = [value for value in map(of_row, rows.get(part, ())) if value is not None]
        if not values:
            return None
        if min(values) <= 0:
            raise ValueError(f"{part}: a rate that is not above 0")
        return Rate(min(values), max(values), f"{part}: {what}, {len(values)} row{'s' * (len(values) > 1)}")

    def product(part: str, side: str) -> Rate | None:
        return rate(part, side, lambda row: row[side] * 1e12 if side in row and row["tokens"] >= LARGE else None)

    def launched(what: str, key: str) -> Rate | None:
        return rate("launch", f"{what}, {key}", lambda row: 1e6 / row[key] if row["what"] == what else None)

    def decoded(answers: int, copy: Rate) -> Rate | None:
        def kernels(row: Mapping[str, Any]) -> float | None:
            if row["rows"] != answers or "GB" not in row:
                return None
            beside = row["graph (s)"] - row["GB"] * 1e9 / copy.high  # below 0 if the bytes lay in a cache
            return row["kernels"] / beside if beside > 0 else None

        return rate("graph", f"{answers} answers", kernels)

    copy = rate("quantizers", "copy", lambda row: row["GB/s"] / row["of copy"] * 1e9)
    native = Rates(
        source=f"measured on {device} ({path})",
        dense=product("gemms", "BF16 cuBLAS"),
        experts=product("grouped", "BF16 torch._grouped_mm"),
        copy=copy,
        fp8_dense=product("gemms", "FP8 torch._scaled_mm"),
    )
    exact = replace(
        native,
        fp8_dense=product("gemms", "FP8"),
        fp8_experts=product("grouped", "FP8"),
        fp8_gradient=product("grouped", "FP8 wgrad"),
        launches=launched("launch", "us of the host"),
        nodes=launched("node", "us"),
        decode={answers: decoded(answers, copy) for answers in DECODED} if copy else {},
    )
    if not any(isinstance(each, Rate) for each in vars(exact).values()):
        expected = "rows of `gemms`, `grouped`, `quantizers` or `launch`"
        raise user_error("--bench", f"{path} of {device} without rates that a plan uses", expected, remedy)
    return {"exact": exact, "native": native}


OF_LAYER: dict[tuple[Mode, bool], tuple[int, int]] = {
    ("exact", True): (11, 15),
    ("exact", False): (9, 24),
    ("native", True): (15, 19),
    ("native", False): (11, 15),
}
"""Kernels of a dense layer and of a layer with experts, by mode and by whether products are FP8. Exact mode's were
counted on meta tensors, for 64 answers of Qwen3-8B and Qwen3-30B-A3B. Native mode's were counted in the code of SGLang
0.5.19. Other architectures are assumed to have as many."""
BESIDE_LAYERS = 14
"""Kernels outside the layers: embedding, last norm, head, truncation, draw and log-probabilities."""


@dataclass(frozen=True)
class Decode:
    batch: int
    """The number of answers. The step computes one token of each."""
    context: float
    """Tokens that each answer has so far."""
    kernels: int
    """Kernels of the step's CUDA graph."""
    weights: float
    """Bytes of the weights that the step reads, each on one rank."""
    cache: float
    """Bytes of keys and values that each rank reads, and of states that it reads and writes, summed over all ranks."""
    ranks: int = 1

    @property
    def bytes(self) -> float:
        """Bytes that each rank moves."""
        return (self.weights + self.cache) / self.ranks


def decode_step(
    shape: Shape, spec: QuantSpec, batch: int, context: float, ranks: int = 1, mode: Mode = "exact",
    each: int = BF16_BYTES,
) -> Decode:  # fmt: skip
    """Return what one decode step reads and launches on an engine of `ranks` GPUs.

    batch: number of answers. context: tokens that each answer has so far. each: bytes of a number in the cache.
    """
    sizes = shape.sizes
    read = 1 - (1 - sizes.top_k / max(1, sizes.experts)) ** batch  # of equally likely experts, as many as are expected
    weights = sum(
        weight_bytes(shape, weight, spec) * (read if weight.share == "experts" else 1.0)
        for weight in shape.weights
        if weight.place != "first"  # of which an answer takes a row; a tied one is read as the head
    )
    cache = ranks * batch * (context * shape.kv_bytes(each, ranks) + 2 * shape.request_bytes(ranks))
    kernels = sum(OF_LAYER[mode, spec.quantized][sizes.has_experts(layer)] for layer in range(sizes.layers))
    return Decode(batch, context, BESIDE_LAYERS + kernels, weights, cache, ranks)
