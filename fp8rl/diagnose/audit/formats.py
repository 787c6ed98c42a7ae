"""Tells the format of a tensor by its values: FP8 arithmetic that is emulated leaves BF16 tensors of FP8 values."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import format_of
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import QuantSpec, Role, TensorSpec

ROWS = 256
"""Rows of a larger matrix that are looked at."""
FEWEST = 64
"""Numbers, below which values say nothing: any few of them may be on a grid by chance."""
SAME_CODE = 2.0**-18
"""Relative difference of two FP32 numbers that stand for the same code: scales that are not powers of two round."""


class Grids:
    """The FP8 grids on which the operands of one run may lie, coarse ones first."""

    def __init__(self, numerics: NumericsConfig) -> None:
        default = QuantSpec.preset("fp8_block_pow2")
        self._specs: dict[Role, list[TensorSpec]] = {}
        for role in ("weight", "activation", "gradient"):
            planned: TensorSpec = getattr(numerics.spec, role)
            basis = planned if planned.quantized else getattr(default, role)
            scales = dict.fromkeys((basis.scale, "pow2"))
            self._specs[role] = [
                replace(basis, format=f, scale=s, rounding="nearest") for f in ("e5m2", "e4m3") for s in scales
            ]

    def format(self, x: Tensor, role: Role) -> str | None:
        """The narrowest format that holds a matrix [.., R, C] as it is, in groups along either axis.

        None where too few numbers are there to say.
        """
        if x.dtype not in (torch.bfloat16, torch.float32):
            return format_of(x.dtype)
        matrix = x.detach().reshape(-1, x.shape[-1])
        ways = [_sample(way, block=role == "weight") for way in (matrix, matrix.t())]
        specs = self._specs[role]
        telling = [way for way in ways if _evidence(way, specs[0]) >= FEWEST]
        on_grid = (spec.format for spec in specs for way in telling if _unchanged(way, spec))
        return next(on_grid, format_of(x.dtype) if len(telling) == len(ways) else None)


def _evidence(x: Tensor, spec: TensorSpec) -> int:
    """Count the numbers that say something: those that are not zero, without one of each group, whose scale fits it."""
    width = spec.block_shape(*x.shape)[1]
    full = F.pad(x, (0, -x.shape[1] % width)).reshape(-1, width).count_nonzero(1)
    return int((full - 1).clamp(min=0).sum())


def _sample(x: Tensor, *, block: bool) -> Tensor:
    """Rows of a matrix: the fullest, as what is not learnt from has gradients of zero, or whole blocks of them."""
    if block or len(x) <= ROWS:
        return x[:ROWS].contiguous()
    return x[(x != 0).sum(1).topk(ROWS).indices]


def stored(x: Tensor) -> str:
    """The format of what is kept from step to step: BF16 if FP32 numbers are all of them BF16 ones, and not too few."""
    judged = x.dtype is torch.float32 and int(x.count_nonzero()) >= FEWEST
    return "bf16" if judged and torch.equal(x.bfloat16().float(), x) else format_of(x.dtype)


def _unchanged(x: Tensor, spec: TensorSpec) -> bool:
    again, x = fake_quantize(x, spec, torch.float32), x.float()
    return bool(((again - x).abs() <= SAME_CODE * x.abs()).all())
