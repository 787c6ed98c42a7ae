"""Faults that are planted into an engine's own process, before it serves. `PLANT` names one to a server that is forked
from the template of `warm_engine`."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from fp8rl.rollout.plugin.weights import ServedWeights

PLANT = "FP8RL_TEST_PLANT"


def stale_operands() -> None:
    """Products multiply with what was made of the first weights for good, and every commit says that it was made anew.
    Parameters, their digests and versions are right."""
    make = ServedWeights._make_operands

    def pretended(self: ServedWeights, parameters: Set[Tensor]) -> set[Tensor]:
        stale = {parameter for parameter in parameters if self._held[parameter].operand is not None}
        return make(self, parameters - stale) | stale

    ServedWeights._make_operands = pretended  # type: ignore[method-assign]
