"""Faults that are planted into an engine's own process, before it serves. `PLANT` names one to a server that is forked
from the template of `warm_engine`."""

import dataclasses
from collections.abc import Set
from typing import Any

from torch import Tensor

from fp8rl.rollout.engine.plugin.families.gated_delta import States
from fp8rl.rollout.engine.plugin.weights import ServedWeights

PLANT = "FP8RL_TEST_PLANT"


def stale_operands() -> None:
    """Products multiply with what was made of the first weights for good, and every commit says that it was made anew.
    Parameters, their digests and versions are right."""
    make = ServedWeights._make_operands

    def pretended(self: ServedWeights, parameters: Set[Tensor]) -> set[Tensor]:
        stale = {parameter for parameter in parameters if self._held[parameter].operand is not None}
        return make(self, parameters - stale) | stale

    ServedWeights._make_operands = pretended  # type: ignore[method-assign]


def states_of_another_request() -> None:
    """Requests that decode together read and write each other's states."""
    of = States.of

    def mixed(backend: Any, layer: int, batch: Any) -> States:
        states = of(backend, layer, batch)
        decodes = batch.forward_mode.is_decode()
        return dataclasses.replace(states, slots=states.slots.roll(1)) if decodes else states

    States.of = mixed  # type: ignore[method-assign, assignment]
