"""Faults that are planted into an engine's own process, before it serves. `PLANT` names one to a server that is forked
from the template of `warm_engine`."""

from collections.abc import Set
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from fp8rl.rollout.engine.plugin import hooks
from fp8rl.rollout.engine.plugin.tokens import Paged
from fp8rl.rollout.engine.plugin.weights import ServedWeights

PLANT = "FP8RL_TEST_PLANT"


def renamed_target() -> None:
    """A newer SGLang, in which a method that is hooked has another name."""
    stock = hooks.hooks_for

    def renamed(*arguments: Any) -> tuple[hooks.Hook, ...]:
        first, *others = stock(*arguments)
        return replace(first, target=f"{first.target}_renamed"), *others

    hooks.hooks_for = renamed


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
    states = Paged.states

    def mixed(self: Paged) -> tuple[Tensor, Tensor, Tensor]:
        slots, *others = states.func(self)
        return slots.roll(1) if self.batch.forward_mode.is_decode() else slots, *others

    Paged.states = cached_property(mixed)  # type: ignore[assignment]
    Paged.states.__set_name__(Paged, "states")
