"""The part of a GPU's rates that a step gets: from `bench.gpu`'s measurements where there are some, else as stated
here.

Nobody knows one number, so there are two corners: everything slow and no transfer hidden behind products; everything
fast and all of them hidden. A step is expected between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.reading import parsed
from fp8rl.rl.experiment.budget.gpus import Gpu

LARGE = 4096
"""Tokens from which a product's rate in `gpu.json` counts: smaller ones are bound by memory, which is calculated."""


@dataclass(frozen=True)
class Rates:
    """One corner: parts of the GPU's rates."""

    dense: float
    """Of BF16 products, like experts."""
    experts: float
    fp8_dense: float
    """Of FP8 products of quantized operands, like fp8_experts."""
    fp8_experts: float
    attention: float
    """Of BF16's peak."""
    bandwidth: float
    link: float
    """Of NVLink's and the network's."""
    launches: float
    """Kernels that the host launches in a second, outside CUDA graphs."""
    nodes: float
    """Kernels of a CUDA graph in a second, if they neither move nor compute anything."""
    hidden: bool
    """Transfers go on beside products."""

    def product(self, experts: bool, fp8: bool) -> float:
        """The efficiency of one product."""
        if fp8:
            return self.fp8_experts if experts else self.fp8_dense
        return self.experts if experts else self.dense


@dataclass(frozen=True)
class Efficiency:
    """Both corners."""

    slow: Rates
    fast: Rates
    source: str
    """Their origin, for the page."""


_NATIVE = Efficiency(
    Rates(0.60, 0.30, 0.36, 0.165, 0.35, 0.60, 0.50, 1e6 / 5, 1e6 / 6.6, hidden=False),
    Rates(0.80, 0.70, 0.68, 0.60, 0.75, 0.90, 0.90, 1e6 / 5, 1e6 / 6.6, hidden=True),
    "assumed: BF16 products 0.6-0.8 of the peak, of experts 0.3-0.7; FP8's 1.2-1.7 times as fast, of experts 1.1-1.7 "
    "(DeepGEMM publishes 1.1-1.36 PFLOP/s on H800, the top of it); attention 0.35-0.75 (FlashAttention-2 and -3 on "
    "H100); memory 0.6-0.9 (one H100 copied 3.0 of its 3.35 TB/s); links 0.5-0.9; 5 us a launch; "
    "6.6 us a kernel of a CUDA graph (the most that one H100 can have taken)",
)
_EXACT = Efficiency(
    replace(_NATIVE.slow, fp8_dense=0.33, attention=0.25, launches=1e6 / 105),
    replace(_NATIVE.fast, fp8_dense=0.45, fp8_experts=0.45, attention=0.45, launches=1e6 / 88),
    "assumed: as in native mode, but for the shared kernels: FP8 0.33-0.45 (650-900 TFLOP/s, predicted from their "
    "compiled code; one H100 gave 673-836 in products of 4,096 and 16,384 tokens), attention 0.25-0.45; 88-105 us a "
    "launch (one H100's host)",
)


def assumed(mode: Mode) -> Efficiency:
    """Return the efficiency that is assumed where nothing was measured."""
    return _EXACT if mode == "exact" else _NATIVE


def measured(path: Path, mode: Mode, gpu: Gpu) -> Efficiency:
    """Efficiency from a `gpu.json` that `python -m lab.bench.gpu` has written on such a GPU; what it lacks is assumed.

    Raises:
        UserError: it cannot be read as one.
    """
    remedy = "Make one with `python -m lab.bench.gpu gemms grouped launch` on such a GPU, or leave --bench out."
    return parsed(path, "--bench", lambda report: _measured(report, path, mode, gpu, remedy), remedy)


def _measured(report: Mapping[str, Any], path: Path, mode: Mode, gpu: Gpu, remedy: str) -> Efficiency:
    base, exact = assumed(mode), mode == "exact"
    rows, device = report["rows"], str(report["machine"]["device"])
    gemms, grouped, launch = (rows.get(part, ()) for part in ("gemms", "grouped", "launch"))
    found = {
        "dense": _parts(gemms, "BF16 cuBLAS", gpu.bf16),
        "fp8_dense": _parts(gemms, "FP8" if exact else "FP8 torch._scaled_mm", gpu.fp8),
        "experts": _parts(grouped, "BF16 torch._grouped_mm", gpu.bf16),
        "fp8_experts": _parts(grouped if exact else (), "FP8", gpu.fp8),
        "launches": [1e6 / row["us of the host"] for row in launch if exact and row["what"] == "launch"],
        "nodes": [1e6 / row["us"] for row in launch if row["what"] == "node"],
    }
    found = {name: values for name, values in found.items() if values}
    if min(chain(*found.values()), default=1) <= 0:
        raise ValueError("a rate that is not above 0")
    if not found:
        raise user_error(
            "--bench",
            found=f"{path} of {device} without rates that a plan takes",
            expected="rows of `gemms`, `grouped` or `launch`",
            remedy=remedy,
        )
    return Efficiency(
        replace(base.slow, **{name: min(values) for name, values in found.items()}),
        replace(base.fast, **{name: max(values) for name, values in found.items()}),
        f"measured on {device} ({path}): {', '.join(found)}; the rest {base.source}",
    )


def _parts(rows: Any, side: str, peak: float) -> list[float]:
    """Parts of the peak that a side reached in rows of TFLOP/s."""
    return [row[side] * 1e12 / peak for row in rows if row["tokens"] >= LARGE and side in row]
