"""The gradient of an embedding: the sum of each token's gradients, in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import op


@op
def add_by_token(total: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add to each row of `total` the sum of the rows of its token.

    total [V, H], FP32 or the rows' dtype. rows [T, H], tokens int64 [T]; a token outside 0 to V - 1 is another rank's,
    and left out. The rows of a token are added in their order, in FP32, and their sum is rounded once to their dtype.
    """
    mine = (tokens >= 0) & (tokens < len(total))
    tokens, rows = tokens[mine], rows[mine]
    ordered, counts = rows[tokens.argsort(stable=True)].float(), tokens.bincount(minlength=len(total))
    sums = torch.segment_reduce(ordered, "sum", lengths=counts, axis=0, initial=0.0, unsafe=True)
    total.add_(sums.to(rows.dtype))
