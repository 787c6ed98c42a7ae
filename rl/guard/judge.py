"""The gates of a run in action: what becomes of a step, decided before it is trained on. It judges; it never trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from fp8rl.rl.algorithms.base import AlgorithmConfig
from fp8rl.rl.experiment.gates import GateSection, GuardSection
from fp8rl.rl.guard.gates import Firing, Gates, GateState
from fp8rl.rl.record.events import Event

TIS_CAP_WITHOUT_TIS = 2.0
"""C of the clip fractions where no cap is configured."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Reason for which a pass gave no gradients to apply.

    metric, value: what was not finite, as in an `Event`. bound: in words. reason: a sentence. rows: of the batch, that
    it came from.
    """

    metric: str
    value: float | None
    bound: str
    reason: str
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Decision on a step.

    events: gates that fired and faults, of the pass that was judged. why: what these and an earlier pass of the step
    have said. fired: gates, over both. withheld: the batch is not trained on. retry: a gate changed the objective or
    the routes, so that the pass is done again before the update. resync: the engines are synced although the weights
    stay. fall_back: both sides go to BF16 before that. stop: why the run ends with this step, empty if it goes on.
    """

    events: tuple[Event, ...]
    why: tuple[str, ...]
    fired: int
    withheld: bool
    retry: bool
    resync: bool
    fall_back: bool
    stop: str


class Guard:
    """Judges the steps of one run. What its gates change stands in `gate_state`, which checkpoints carry.

    Args:
        replays: whether the experiment replays the engine's routes from the start.
    """

    def __init__(
        self,
        gates: Sequence[GateSection],
        settings: GuardSection,
        algorithm: AlgorithmConfig,
        gate_state: GateState,
        *,
        replays: bool,
    ) -> None:
        self._gates = Gates(gates, gate_state.rules)
        self._settings, self._configured, self._gate_state, self._replays = settings, algorithm, gate_state, replays

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The algorithm as configured, but for a lower `tis_cap` that a gate has set."""
        configured, lower = self._configured.correction.tis_cap, self._gate_state.tis_cap
        if configured is None or lower is None:
            return self._configured
        return self._configured.model_copy(update={"tis_cap": min(configured, lower)})

    @property
    def tis_cap(self) -> float:
        """C of the clip fractions: the cap as configured, so that a gate that tightens it does not fire for its own
        doing; 2 where there is none."""
        return self._configured.correction.tis_cap or TIS_CAP_WITHOUT_TIS

    @property
    def replays(self) -> bool:
        """Return whether the trainer takes the engine's experts now."""
        return self._replays or self._gate_state.router_replay

    def judge(self, step: int, metrics: Mapping[str, float], fault: Fault | None, capsule: str | None) -> Verdict:
        """Decide about a step on its metrics so far.

        capsule: where the step's worst sequences will be kept if a gate fires or the pass had a fault; None if nowhere.
        """
        return self._decide(step, self._gates.check(step, metrics), fault, capsule)

    def recheck(
        self, step: int, verdict: Verdict, metrics: Mapping[str, float], fault: Fault | None, capsule: str | None
    ) -> Verdict:
        """The verdict after the pass that it asked for, which may break a bound too, or come to nothing.

        metrics: `train/...` of that pass.
        """
        again = self._decide(step, self._gates.recheck(step, metrics), fault, capsule)
        return dataclasses.replace(
            again,
            why=verdict.why + again.why,
            fired=verdict.fired + again.fired,
            resync=verdict.resync or again.resync,
            fall_back=verdict.fall_back or again.fall_back,
            stop="; ".join(filter(None, [verdict.stop, again.stop])),
        )

    def metrics(self, verdict: Verdict) -> dict[str, float]:
        """`gates/...` of a step."""
        values = {
            "gates/fired": float(verdict.fired),
            "gates/withheld": float(verdict.withheld),
            "gates/router_replay": float(self.replays),
            "gates/bf16": float(self._gate_state.bf16),
        }
        tis_cap = self.algorithm.correction.tis_cap
        return values if tis_cap is None else values | {"gates/tis_cap": tis_cap}

    def _decide(self, step: int, firings: Sequence[Firing], fault: Fault | None, capsule: str | None) -> Verdict:
        """Take the actions that last."""
        events = [firing.event(step) for firing in firings]
        if fault is not None:
            events.append(self._event(step, fault))
        events = [dataclasses.replace(event, capsule=capsule) for event in events]
        changed = [self._apply(firing) for firing in firings]
        self._gate_state.rules = self._gates.state()

        actions = {event.action for event in events}
        stops = [event.said for event in events if event.action == "checkpoint_and_stop"]
        withheld = bool(stops) or fault is not None or bool(self._gates.withholding())
        return Verdict(
            events=tuple(events),
            why=tuple(event.text for event in events),
            fired=len(firings),
            withheld=withheld,
            retry=any(changed) and not withheld,
            resync=bool(actions & {"resync", "bf16_both"}),
            fall_back="bf16_both" in actions and not self._gate_state.bf16,
            stop="; ".join(stops),
        )

    def _apply(self, firing: Firing) -> bool:
        """Take the actions that last; whether the objective or the routes are others now."""
        before = self.algorithm.correction.tis_cap, self.replays
        gate_state, rule = self._gate_state, firing.rule
        if rule.action == "tighten_tis":
            gate_state.tis_cap = min(rule.tis_cap or 1.0, gate_state.tis_cap or math.inf)
        if rule.action == "enable_r3":
            gate_state.router_replay = True
        return before != (self.algorithm.correction.tis_cap, self.replays)

    def _event(self, step: int, fault: Fault) -> Event:
        action = "skip_step" if self._settings.nonfinite_loss == "skip" else "checkpoint_and_stop"
        return Event(step, fault.metric, fault.value, fault.bound, action, None, f"{action}: {fault.reason}")
