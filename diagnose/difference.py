"""The distance of two log-probabilities of the same tokens, in the numbers that every diagnosis gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fp8rl.rl.mismatch import agreement

_ABS_DIFF = "mismatch/train_rollout_logprob_abs_diff_"


@dataclass(frozen=True)
class Difference:
    """abs(d) of two log-probabilities of the same tokens, in nats.

    Attributes:
        tokens: with finite d, the denominator. nonfinite: the others.
        mean, p99, max: of abs(d); None if no token is left.
        exact_frac: fraction of tokens with d == 0.
        p50: of abs(d). k3_kl: KL(second || first) by the estimate k3, per token (`rl.mismatch`).
    """

    tokens: int
    nonfinite: int
    mean: float | None
    p99: float | None
    max: float | None
    exact_frac: float | None
    p50: float | None = None
    k3_kl: float | None = None

    @property
    def zero(self) -> bool:
        """Every token has d == 0."""
        return self.nonfinite == 0 and self.max == 0.0


def difference(first: Tensor, second: Tensor, mask: Tensor) -> Difference:
    """Compare on the tokens of a bool mask; all of one shape [B, S]."""
    values = agreement(first, second, mask)
    return Difference(
        tokens=int(values["mismatch/tokens"]),
        nonfinite=int(values["mismatch/nonfinite_count"]),
        mean=values.get(_ABS_DIFF + "mean"),
        p99=values.get(_ABS_DIFF + "p99"),
        max=values.get(_ABS_DIFF + "max"),
        exact_frac=values.get("mismatch/exact_frac"),
        p50=values.get(_ABS_DIFF + "p50"),
        k3_kl=values.get("mismatch/k3_kl"),
    )


def described(d: Difference) -> str:
    """`|d| mean 0, p99 0, max 0, exact 1 on 640 tokens`"""
    if d.mean is None or d.p99 is None or d.max is None or d.exact_frac is None:
        return f"no finite d, {d.nonfinite} that are not"
    rest = f", {d.nonfinite} not finite" if d.nonfinite else ""
    return (
        f"|d| mean {shown_number(d.mean)}, p99 {shown_number(d.p99)}, max {shown_number(d.max)}, "
        f"exact {d.exact_frac:.4g} on {d.tokens} tokens{rest}"
    )


def shown_number(value: float | None) -> str:
    """`1.23e-04`, 0 for zero, `none` where there is nothing."""
    return "none" if value is None else "0" if value == 0 else f"{value:.2e}"
