"""Decides whether a step is trained on: from the gates that fire, and from faults of its forward and backward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, TypeAdapter

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.section import validated
from fp8rl.rl.algorithms.base import AlgorithmConfig
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.guard.gates import Firing, Gates, RuleState
from fp8rl.rl.record.history import Event
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.trainer.checkpoint.files import read_about

TIS_CAP_WITHOUT_TIS = 2.0
"""The cap C that clip fractions are measured with, if the spec has none."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """The reason why a pass gave no gradients to apply."""

    metric: str
    """The metric of the fault, as in an `Event`."""
    value: float | None
    """The metric's value, as in an `Event`."""
    bound: str
    """The bound that the metric broke, in words."""
    reason: str
    """What happened, in a sentence."""
    rows: tuple[int, ...]
    """Rows of the batch that the fault came from."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision on a step."""

    events: tuple[Event, ...]
    """Gates that fired, and faults, in the pass that was judged."""
    why: tuple[str, ...]
    """Sentences of `events`, and of the events of an earlier pass of the step."""
    fired: int
    """Number of gates that fired, over both passes."""
    withheld: bool
    """The batch is not trained on."""
    retry: bool
    """A gate changed the objective or the routes, so that the pass is done again before the update."""
    resync: bool
    """The engines are synced although the weights have not changed."""
    fall_back: bool
    """Both sides change to BF16 before the sync."""
    stop: str
    """The reason why the run ends with this step; empty if the run continues."""


@dataclasses.dataclass
class GateState:
    """The changes that gates have made for the rest of a run, and the state of each gate. Checkpoints keep it."""

    tis_cap: Annotated[float, Field(ge=1.0)] | None = None
    """The lower cap of the importance weight that a gate has set; None: as the spec has it."""
    router_replay: bool = False
    """A gate turned the replay of the engine's experts on."""
    bf16: bool = False
    """Both sides fell back to BF16."""
    rules: Mapping[str, RuleState] = dataclasses.field(default_factory=dict)
    """See `Gates.state`."""

    @classmethod
    def of_checkpoint(cls, run: RunDir, step: int | None) -> GateState:
        """Read the state from the checkpoint of `step`; without a step, return the state of a new run."""
        if step is None:
            return cls()
        gate_state = read_about(run.checkpoint(step)).extra.get("standing", {})
        where = f"checkpoint of step {step}: standing"
        return validated(TypeAdapter(cls).validate_python, gate_state, where, "Resume from an older checkpoint.")

    def numerics(self, configured: NumericsConfig) -> NumericsConfig:
        """Return the numerics of both sides: the spec's, or BF16 on both. Neither side ever falls back alone."""
        return configured.in_bf16() if self.bf16 else configured


class Guard:
    """Judges the steps of one run. `gate_state` has the changes that gates make; checkpoints keep it."""

    def __init__(self, experiment: Experiment, gate_state: GateState) -> None:
        self._gates = Gates(experiment.gates, gate_state.rules)
        self._experiment, self._gate_state = experiment, gate_state

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The algorithm of the spec, with the lower `tis_cap` if a gate has set one."""
        configured, lower = self._experiment.algorithm, self._gate_state.tis_cap
        if (cap := configured.correction.tis_cap) is None or lower is None:
            return configured
        return configured.model_copy(update={"tis_cap": min(cap, lower)})

    @property
    def tis_cap(self) -> float:
        """The cap C that clip fractions are measured with: the spec's, or 2 without one. A cap that a gate has lowered
        does not count, so that the gate does not fire because of its own action."""
        return self._experiment.algorithm.correction.tis_cap or TIS_CAP_WITHOUT_TIS

    @property
    def replays(self) -> bool:
        """Return whether the trainer takes the engine's experts now."""
        return self._experiment.numerics.router_replay == "replay" or self._gate_state.router_replay

    def judge(self, step: int, metrics: Mapping[str, float], fault: Fault | None, capsule: str | None) -> Verdict:
        """Decide whether a step is trained on, from the metrics that it has so far.

        capsule: where the step's worst sequences will be kept if a gate fires or the pass had a fault; None if nowhere.
        """
        return self._decide(step, self._gates.check(step, metrics), fault, capsule)

    def recheck(
        self, step: int, verdict: Verdict, metrics: Mapping[str, float], fault: Fault | None, capsule: str | None
    ) -> Verdict:
        """Return the verdict after a second pass or a later update of the step, which may break a bound or fail, too.

        metrics: `train/...` of the second pass; empty for an update.
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
        """Return the `gates/...` metrics of a step."""
        values = {
            "gates/fired": float(verdict.fired),
            "gates/withheld": float(verdict.withheld),
            "gates/router_replay": float(self.replays),
            "gates/bf16": float(self._gate_state.bf16),
        }
        tis_cap = self.algorithm.correction.tis_cap
        return values if tis_cap is None else values | {"gates/tis_cap": tis_cap}

    def _decide(self, step: int, firings: Sequence[Firing], fault: Fault | None, capsule: str | None) -> Verdict:
        """Apply the lasting actions of the gates that fired, and return the verdict on them and on the fault."""
        events = [firing.event(step) for firing in firings]
        if fault is not None:
            action = "skip_step" if self._experiment.guard.nonfinite_loss == "skip" else "checkpoint_and_stop"
            text = f"{action}: {fault.reason}"
            events.append(Event(step, fault.metric, fault.value, fault.bound, action, None, text))
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
        """Apply a gate's lasting action; return whether it changed the objective or the routes."""
        before = self.algorithm.correction.tis_cap, self.replays
        gate_state, rule = self._gate_state, firing.rule
        if rule.action == "tighten_tis":
            gate_state.tis_cap = min(rule.tis_cap or 1.0, gate_state.tis_cap or math.inf)
        if rule.action == "enable_r3":
            gate_state.router_replay = True
        return before != (self.algorithm.correction.tis_cap, self.replays)
