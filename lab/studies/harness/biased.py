"""Engines with a known, persistent bias: the trainer stays exact, so that the bias is the only mismatch.

`environment(bias)` is what a run's environment needs. It does not reach an engine of native mode.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Bias = Literal["head", "e2m1"]
"""`head`: a fixed offset of each token's logit. `e2m1`: products with weights rounded to the grid of E2M1."""
OFFSET = 3.0
"""Standard deviation of the offsets. At a temperature of 2 the KL of M's draws is then some 0.1 nats."""
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32
"""Weights of a row that share a scale."""


def environment(bias: Bias | None) -> dict[str, str]:
    """Return the variables of a run whose engine has this bias; None: as they are."""
    if bias is None:
        return dict(os.environ)
    hook = str(Path(__file__).with_name("engine_hook"))
    return os.environ | {"BIASED_ENGINE": bias, "PYTHONPATH": os.pathsep.join([hook, os.environ.get("PYTHONPATH", "")])}


def install(bias: str) -> None:
    """Bias the engine of this process, whose plugin is being imported."""
    if bias == "head":
        from fp8rl.rollout.engine.plugin import sampling

        original = sampling.narrowed

        def narrowed(logits: Tensor, sampling_info: Any) -> Tensor:
            return original(logits + offsets(logits.shape[-1]), sampling_info)

        sampling.narrowed = narrowed
    else:
        from fp8rl.rollout.engine.plugin import weights

        quantized = weights.QuantizedTensor
        weights.QuantizedTensor = lambda codes, scales, spec: quantized(to_e2m1(codes), scales, spec)  # type: ignore


def offsets(vocabulary: int) -> Tensor:
    """Return the offset of each token's logit, FP32 [V], the same in every engine."""
    return OFFSET * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))


def to_e2m1(codes: Tensor) -> Tensor:
    """Round FP8 codes [..., K] to 4 bits and a scale for each `GROUP` of a row, in their own dtype."""
    groups = codes.float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / GRID[-1]).clamp(min=2.0**-9)
    grid = torch.tensor(GRID)
    middles = (grid[1:] + grid[:-1]) / 2
    rounded = grid[torch.bucketize(groups.abs() / scale, middles)] * groups.sign() * scale
    return rounded.flatten(-2).to(codes.dtype)
