"""Judges the metrics of a step by the run's gates. A gate fires once, and again only after its metric has recovered.

`rl.guard.guard` carries out the gates' actions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

from pydantic import ConfigDict, NonNegativeInt

from fp8rl.rl.experiment.gate_sections import SEVERITY, WITHHOLDING, GateSection
from fp8rl.rl.record.history import Event
from fp8rl.rl.record.metrics import metric


def late_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that were measured after the step's decision. Gates judge them in the next step."""
    return {name: value for name, value in row.items() if metric(name).late}


@dataclasses.dataclass(frozen=True)
class Firing:
    """A gate that fired: its rule, and the metric's value."""

    rule: GateSection
    value: float

    def event(self, step: int) -> Event:
        """The event for the record of the run."""
        rule = self.rule
        steps = f" for {rule.for_steps} steps" if rule.for_steps > 1 else ""
        text = f"{rule.action}: {rule.metric} = {self.value:.3g} is {rule.bound}{steps}"
        return Event(step, rule.metric, self.value, rule.bound, rule.action, None, text)


@dataclasses.dataclass
class RuleState:
    """The state of one gate."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    beyond: NonNegativeInt = 0
    """For how many steps in a row the metric has been beyond its bound."""
    tripped: bool = False
    """The metric was beyond its bound for `for_steps` steps, and has not recovered since."""
    fired: bool = False
    """The gate has fired since it tripped."""
    quiet_until: NonNegativeInt = 0
    """The last step of the cooldown."""


class Gates:
    """The gates of a run and their states.

    Args:
        rules: the gates of the spec.
        state: what `state` returned in an earlier part of the run; gates that are not in it start again.
    """

    def __init__(self, rules: Sequence[GateSection], state: Mapping[str, RuleState] | None = None) -> None:
        saved = state or {}
        self._rules = [(rule, dataclasses.replace(saved.get(_name(rule), RuleState()))) for rule in rules]
        self._before: list[RuleState] = []

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Firing]:
        """Return the gates that fire on this step's metrics, the mildest action first.

        A metric that is missing or not finite leaves the states of its gates unchanged.
        """
        self._before = [dataclasses.replace(state) for _, state in self._rules]
        return _fire(step, self._rules, metrics)

    def recheck(self, step: int, metrics: Mapping[str, float]) -> list[Firing]:
        """Return the withholding gates that fire if these metrics replace the metrics of the step's `check`.

        The `check` must not have withheld the step. Gates that do not withhold, and gates on other metrics, keep the
        state that the `check` left.
        """
        again = []
        for index, ((rule, _), before) in enumerate(zip(self._rules, self._before, strict=True)):
            if rule.action in WITHHOLDING and math.isfinite(metrics.get(rule.metric, math.nan)):
                self._rules[index] = rule, before
                again.append(self._rules[index])
        return _fire(step, again, metrics)

    def withholding(self) -> list[GateSection]:
        """The gates that now withhold all updates, because their metric has not recovered."""
        return [rule for rule, state in self._rules if state.tripped and rule.action in WITHHOLDING]

    def state(self) -> dict[str, RuleState]:
        """The states of all gates, for a checkpoint."""
        return {_name(rule): dataclasses.replace(state) for rule, state in self._rules}


def _fire(step: int, rules: Sequence[tuple[GateSection, RuleState]], metrics: Mapping[str, float]) -> list[Firing]:
    fired = []
    for rule, state in rules:
        value = metrics.get(rule.metric, math.nan)
        if not math.isfinite(value):
            continue
        upper = rule.above is not None
        bound = rule.above if rule.above is not None else rule.below
        assert bound is not None
        state.beyond = state.beyond + 1 if (value > bound if upper else value < bound) else 0
        if state.beyond >= rule.for_steps:
            state.tripped = True
        recover = bound if rule.recover is None else rule.recover
        if value <= recover if upper else value >= recover:
            state.tripped = state.fired = False
        if state.tripped and not state.fired and step > state.quiet_until:
            state.fired, state.quiet_until = True, step + rule.cooldown_steps
            fired.append(Firing(rule, value))
            if rule.action == "checkpoint_and_stop":
                state.beyond, state.tripped, state.fired = 0, False, False  # a run that is resumed is judged again
    return sorted(fired, key=lambda firing: SEVERITY.index(firing.rule.action))


def _name(rule: GateSection) -> str:
    return json.dumps(rule.model_dump(mode="json"), sort_keys=True)
