"""Gates: rules over the metrics of a step that fire once, and arm again after the metric has recovered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rl.spec.sections import GateSection


@dataclasses.dataclass(frozen=True)
class Firing:
    """A gate that fired: its rule and the value that did it."""

    rule: GateSection
    value: float

    def __str__(self) -> str:
        bound = f"above {self.rule.above}" if self.rule.above is not None else f"below {self.rule.below}"
        steps = f" for {self.rule.for_steps} steps" if self.rule.for_steps > 1 else ""
        return f"{self.rule.action}: {self.rule.metric} = {self.value:.3g} is {bound}{steps}"


class Gates:
    """The rules of a run and how many steps in a row each has been beyond its bound."""

    def __init__(self, rules: Sequence[GateSection]) -> None:
        self._rules = rules
        self._beyond = [0] * len(rules)

    def check(self, metrics: Mapping[str, float]) -> list[Firing]:
        """The gates that fire on this step's metrics. A step without the metric leaves its gate as it was."""
        fired = []
        for index, rule in enumerate(self._rules):
            if rule.metric not in metrics:
                continue
            value = metrics[rule.metric]
            self._beyond[index] = self._beyond[index] + 1 if _is_beyond(rule, value) else 0
            if self._beyond[index] == rule.for_steps:
                fired.append(Firing(rule, value))
        return fired


def _is_beyond(rule: GateSection, value: float) -> bool:
    return value > rule.above if rule.above is not None else value < (rule.below or 0.0)
