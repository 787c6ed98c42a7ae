"""KL divergence from the model that the run started from, which keeps the policy near it: in the loss or the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, field_validator
from torch import Tensor

from fp8rl.numerics.core.section import Section
from fp8rl.rl.mismatch.statistics import clamp_exponent

Estimator = Literal["k2", "k3"]


def k2(x: Tensor) -> Tensor:
    """x² / 2"""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """e^-x - 1 + x, without its cancellation; x is clamped to ±20."""
    x = clamp_exponent(x)
    return (-x).expm1() + x


ESTIMATORS: dict[Estimator, Callable[[Tensor], Tensor]] = {"k2": k2, "k3": k3}


class KlLossSection(Section):
    """A term of the loss."""

    coefficient: float = Field(default=0.0, ge=0.0)
    """The loss of a token per nat of KL; 1e-3 to 1e-2 is usual. 0: no such term."""
    estimator: Estimator = "k2"
    """`k2` has the gradient of the KL, `k3` its value."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _k1_teaches_nothing(cls, name: Any) -> Any:
        if name == "k1":
            raise ValueError(
                "found k1, expected k2 or k3: as a loss, k1 has a gradient whose mean is zero. Set estimator=k2, or "
                "put k1 into the reward with algorithm.kl.reward.coefficient"
            )
        return name


class KlRewardSection(Section):
    """A penalty on each token's reward, k1 of the weights that sampled it, subtracted before advantages are made."""

    coefficient: float = Field(default=0.0, ge=0.0)
    """The penalty on a token's reward per nat. 0: none."""


class KlSection(Section):
    """The reference is the model of `model.path`, frozen, in the trainer's own numerics and layout. It is loaded only
    where a coefficient is not 0."""

    loss: KlLossSection = KlLossSection()
    """The KL term of the loss."""
    reward: KlRewardSection = KlRewardSection()
    """The KL penalty in the reward."""

    @property
    def needs_reference(self) -> bool:
        """Return whether a reference is loaded."""
        return self.loss.coefficient > 0 or self.reward.coefficient > 0
