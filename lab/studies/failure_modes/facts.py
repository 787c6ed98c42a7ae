"""The arithmetic of "What stays in BF16 and FP32", done again with the roundings that the formats really have."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.studies.harness.spoiled import Narrow, narrowed

WEIGHT, GRADIENT, FIRST, SECOND = 0.731421, 3.2e-4, 1.1e-4, 8.5e-8
BETA1, BETA2, RATE, EPS = 0.9, 0.95, 3.0e-4, 1.0e-8
"""The chapter's Adam step."""
STEPS = 10_000
TINY_UPDATE = 1e-7
MASTERS: dict[str, Narrow | None] = {"fp8": "fp8 1x128", "bf16": "bf16", "fp32": None}


def facts() -> dict[str, float]:
    """The facts by name; nothing here is random."""
    first = BETA1 * FIRST + (1 - BETA1) * GRADIENT
    second = BETA2 * SECOND + (1 - BETA2) * GRADIENT**2
    step = RATE * first / (math.sqrt(second) + EPS)
    block = _with_neighbours(second)
    stored = float(narrowed(block, "fp8 1x128")[0])
    return {
        "e4m3 largest": torch.finfo(torch.float8_e4m3fn).max,
        "e5m2 largest": torch.finfo(torch.float8_e5m2).max,
        "e4m3 steps in a binade": 1 / torch.finfo(torch.float8_e4m3fn).eps,
        "grain below 1, fp8 1x128": _grain_below_one(lambda x: narrowed(_beside(x), "fp8 1x128")[0]),
        "grain below 1, bf16": _grain_below_one(lambda x: narrowed(x, "bf16")),
        "headroom of 1e-7, fp8": _headroom(lambda x: narrowed(_beside(x), "fp8 1x128")[0]),
        "headroom of 1e-7, bf16": _headroom(lambda x: narrowed(x, "bf16")),
        "headroom of 1e-7, fp32": _headroom(lambda x: x.float()),
        "tail of a gap of 15, fp32": _tail(lambda x: x),
        "tail of a gap of 15, bf16 off by": abs(1 - _tail(lambda x: narrowed(x, "bf16")) / _tail(lambda x: x)),
        "tail of a gap of 15, fp8 / fp32": _tail(lambda x: narrowed(x, "fp8 unscaled")) / _tail(lambda x: x),
        "m": first,
        "v": second,
        "step": step,
        "w": WEIGHT - step,
        "step, v fp8 1x128": RATE * first / (math.sqrt(stored) + EPS),
        "step, v fp8 unscaled": RATE * first / (math.sqrt(float(narrowed(block, "fp8 unscaled")[0])) + EPS),
        **{f"moved in 10,000 steps, {name}": _moved(step, to)[0] for name, to in MASTERS.items()},
        **{f"updates landed, {name}": _moved(step, to)[1] for name, to in MASTERS.items()},
        "least update that moves an fp8 master of 1": _least_update(),
        "script: fp8 master": _script_master(1e-4),
        "script: v": float(_script_quantizer(np.array([9e-8]))[0]),
        "script: fp8 softmax of the last": float(_script_softmax()[4]),
    }


def _beside(x: Tensor) -> Tensor:
    """x and, in its block, a value of 1, by which the block's scale goes."""
    return torch.cat([x.reshape(1), torch.ones(127)])


def _with_neighbours(value: float) -> Tensor:
    """A block of second moments: the value, and squares of normal numbers of its size."""
    normal = torch.randn(127, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor([value]), value * normal.square()])


def _grain_below_one(store: Callable[[Tensor], Tensor]) -> float:
    """The distance from 1 to the next value below, found by bisection over what is stored."""
    least = _bisect(lambda delta: float(store(torch.tensor(1.0 - delta))) < 1.0)
    return 1.0 - float(store(torch.tensor(1.0 - least)))


def _headroom(store: Callable[[Tensor], Tensor]) -> float:
    """Orders of magnitude by which an update of 1e-7 exceeds the least that moves a weight of 1; negative: short."""
    least = _bisect(lambda delta: float(store(torch.tensor(1.0 - delta))) < 1.0)
    return math.log10(TINY_UPDATE / least)


def _bisect(holds: Callable[[float], bool]) -> float:
    low, high = 1e-12, 0.5
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _tail(store: Callable[[Tensor], Tensor]) -> float:
    """The second probability of softmax([0, -15])."""
    return float(store(torch.tensor([0.0, -15.0]).softmax(0))[1])


@cache
def _moved(step: float, to: Narrow | None) -> tuple[float, float]:
    """How far equal updates move a master of WEIGHT in a block whose largest value is 1, and the share that lands."""
    weight = first = torch.tensor(WEIGHT) if to is None else narrowed(_beside(torch.tensor(WEIGHT)), to)[0]
    landed = 0
    for _ in range(STEPS):
        after = weight - step
        stored = after if to is None else narrowed(_beside(after), to)[0]
        if bool(stored == weight):
            break  # and so for good
        weight, landed = stored, landed + 1
    return float(first - weight), landed / STEPS


def _least_update() -> float:
    """The smallest update that the FP8 master of a weight of 1 keeps, in a block of ones."""
    return _bisect(lambda delta: float(narrowed(_beside(torch.tensor(1.0 - delta)), "fp8 1x128")[0]) < 1.0)


def _script_quantizer(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The chapter's `to_fp8_blockwise`: one scale from the largest value, then an even grid of 256 steps."""
    scale = 448.0 / max(float(np.abs(x).max()), 1e-12)
    step = 448.0 / 256
    return np.asarray(np.round(np.clip(x * scale, -448.0, 448.0) / step) * step / scale)


def _script_master(delta: float) -> float:
    weight = 1.0
    for _ in range(STEPS):
        weight = float(_script_quantizer(np.array([weight - delta]))[0])
    return weight


def _script_softmax() -> NDArray[np.float64]:
    logits = _script_quantizer(np.array([2.1, 8.7, 11.3, -3.4, 6.0]))
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())
