"""Agreement sequence by sequence: what the differences of a whole answer add up to.

Every mean divides by the sequences with at least one token of finite d; a sequence counts its finite tokens only.
"""

from __future__ import annotations

from torch import Tensor

from fp8rl.rl.mismatch.statistics import bounded, distribution, effective_sample_size, order_statistics


def sequence_metrics(d: Tensor, used: Tensor) -> dict[str, float]:
    """`mismatch/...` over sequences. d: float64 [B, S], 0 where not used; used: bool [B, S] with at least one True."""
    rows = used.any(dim=1)
    total = d.sum(dim=1)[rows]
    log_geometric = bounded(total / used.sum(dim=1)[rows])
    return {
        **_ratios("mismatch/ppl_ratio", -log_geometric),
        **_ratios("mismatch/geometric_ratio", log_geometric),
        "mismatch/chi2_sequence": bounded(2 * total).expm1().mean().item(),
        "mismatch/ess_sequence": effective_sample_size(bounded(total).exp()).item(),
    }


def _ratios(name: str, log_ratios: Tensor) -> dict[str, float]:
    return distribution(name, log_ratios.exp().mean(), order_statistics(log_ratios).exp())
