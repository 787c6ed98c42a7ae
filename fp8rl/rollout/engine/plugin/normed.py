"""The rows that a norm quantized while it had them at hand, for the FP8 products behind it.

SGLang hands the norm's result from module to module, and knows nothing of a second form of it. So the last norm's
result is kept beside its quantized rows, and a product asks for them with the tensor that it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8rl.numerics import ops


@dataclass(frozen=True)
class Normed:
    """A norm's result. It is held, so that no other tensor can lie at its place."""

    x: Tensor
    rows: Any
    """`numerics.ops.norm_rows`"""
    version: int
    """How often x had been written to."""

    @classmethod
    def of(cls, x: Tensor, rows: Any) -> Normed:
        return cls(x, rows, _version(x))

    def rows_of(self, x: Tensor) -> Any:
        """Return the quantized rows if x is this result, or a view of all of it, as it was; else None."""
        storages = (each.untyped_storage()._cdata for each in (x, self.x))
        same = len(set(storages)) == 1 and x.shape == self.x.shape and x.stride() == self.x.stride()
        unchanged = x.storage_offset() == self.x.storage_offset() and x.dtype == self.x.dtype
        return self.rows if same and unchanged and _version(x) == self.version else None


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def whole_product(x: Tensor, rows: Any, operand: Any, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the FP8 product of x by the number of splits of K and a term: of the rows that a norm quantized if there
    are any, else `plain`."""

    def whole(splits: int, plus: Tensor | None) -> Tensor:
        if rows is None or splits > 1:
            return plain(splits, plus)
        return ops.rows_linear(rows, operand, x.dtype, plus)

    return whole
