"""Costs that `fp8rl plan --bench` reads: of a launch from Python the host's, of a kernel in a CUDA graph the GPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8rl.numerics.kernels.gates import swiglu_quantize
from fp8rl.numerics.kernels.norm import rms_norm_quantize
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.operands import backward_operands
from fp8rl.numerics.kernels.quantize import quantize_rows
from fp8rl.numerics.quantize import quantize
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch, random
from lab.bench.gpu.products import BLOCKS, POW2, ROWS
from lab.bench.short_launches import shortened

TOKENS, FEATURES = 16, 256
"""So few that a kernel has next to nothing to do."""
NODES = 200


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    x, wide = (random(TOKENS, width, device=watch.device) for width in (FEATURES, 2 * FEATURES))
    weight, rows = quantize(random(FEATURES, FEATURES, device=watch.device), BLOCKS), quantize_rows(x, ROWS)
    ours: dict[str, Callable[[], Any]] = {
        "rows 1x128": lambda: quantize_rows(x, ROWS),
        "operands of a backward": lambda: backward_operands(x, x, POW2),
        "RMSNorm + rows": lambda: rms_norm_quantize(x, x[0], 1e-6, ROWS),
        "SwiGLU + rows": lambda: swiglu_quantize(wide, ROWS),
        "FP8 product": lambda: gemm(rows, weight, torch.bfloat16),
    }
    for name, call in ours.items():
        done.row({"what": "launch", "kernel": name}, {"us of the host": watch.host_seconds(call, repeats=200) * 1e6})
        with shortened():
            short = watch.host_seconds(call, repeats=200) * 1e6
        done.row({"what": "short launch", "kernel": name}, {"us of the host": short})
    torch_adds = watch.host_seconds(lambda: x.add_(1), repeats=200)
    done.row({"what": "launch of torch", "kernel": "add"}, {"us of the host": torch_adds * 1e6})
    for name, call in ours.items():
        # One graph is twice as long as the other, so that the host's launch of a graph drops out.
        short, long = (watch.graphed_seconds(call, calls) * calls for calls in (NODES, 2 * NODES))
        done.row({"what": "node", "kernel": name}, {"us": (long - short) / NODES * 1e6})
