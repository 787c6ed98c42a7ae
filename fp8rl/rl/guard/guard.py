"""Decides whether a step is trained on, by the gates that fire and the fault of its pass; it never trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.section import validated
from fp8rl.rl.algorithms.base import AlgorithmConfig
from fp8rl.rl.experiment.gate_sections import GateSection, GuardSection
from fp8rl.rl.guard.gates import Firing, Gates, RuleState
from fp8rl.rl.record.history import Event
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.trainer.checkpoint.files import read_about

TIS_CAP_WITHOUT_TIS = 2.0
"""C of the clip fractions where no cap is configured."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Reason for which a pass gave no gradients to apply."""

    metric: str
    """The metric that was not finite, as in an `Event`."""
    value: float | None
    """Its value, as in an `Event`."""
    bound: str
    """The bound that it broke, in words."""
    reason: str
    """A sentence."""
    rows: tuple[int, ...]
    """Rows of the batch that it came from."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Decision on a step."""

    events: tuple[Event, ...]
    """Gates that fired and faults, of the pass that was judged."""
    why: tuple[str, ...]
    """Sentences of these, and of an earlier pass of the step."""
    fired: int
    """Gates that fired, over both passes."""
    withheld: bool
    """The batch is not trained on."""
    retry: bool
    """A gate changed the objective or the routes, so that the pass is done again before the update."""
    resync: bool
    """The engines are synced although the weights stay."""
    fall_back: bool
    """Both sides go to BF16 before that."""
    stop: str
    """The reason for which the run ends with this step; empty if it goes on."""


@dataclasses.dataclass
class GateState:
    """What gates have changed for the rest of a run, and where each of them stands. Checkpoints carry it."""

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
        """Read the state from the checkpoint of `step`; a new run has the default one."""
        if step is None:
            return cls()
        gate_state = read_about(run.checkpoint(step)).extra.get("standing", {})
        where = f"checkpoint of step {step}: standing"
        return validated(TypeAdapter(cls).validate_python, gate_state, where, "Go on from an older checkpoint.")

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)

    def numerics(self, configured: NumericsConfig) -> NumericsConfig:
        """Return what both sides run: the spec's, or BF16 on both. Neither side ever falls back alone."""
        return configured.in_bf16() if self.bf16 else configured


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
        """Apply lasting actions, and return the verdict on these firings and this fault."""
        events = [firing.event(step) for firing in firings]
        if fault is not None:
            action = "skip_step" if self._settings.nonfinite_loss == "skip" else "checkpoint_and_stop"
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
