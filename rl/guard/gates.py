"""Gates: rules over the metrics of a step that fire once, and again only after the metric has recovered.

The guard takes their actions: it decides what becomes of a step before it is trained on. It judges; it never trains.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.section import validated
from fp8rl.rl.algorithms.base import AlgorithmConfig
from fp8rl.rl.experiment.gate_sections import SEVERITY, WITHHOLDING, GateSection, GuardSection
from fp8rl.rl.record.events import Event
from fp8rl.rl.record.metrics import metric
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.trainer.checkpoint.files import read_about

# What gates have changed for the rest of a run, and where each of them stands. Checkpoints carry it.


@dataclasses.dataclass
class GateState:
    """Changes that gates have made for good."""

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


def late_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step's row that were measured after its decision; they are judged in the step that follows."""
    return {name: value for name, value in row.items() if metric(name).late}


@dataclasses.dataclass(frozen=True)
class Firing:
    """A gate that fired: its rule and the value that did it."""

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
    """State of one rule."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    beyond: NonNegativeInt = 0
    """Steps in a row beyond the bound."""
    tripped: bool = False
    """The metric was beyond it for `for_steps`, and has not recovered since."""
    fired: bool = False
    """This was announced."""
    quiet_until: NonNegativeInt = 0
    """The last step of the cooldown."""


class Gates:
    """The rules of a run and where each of them stands.

    Args:
        rules: as the spec has them.
        state: what `state` of an earlier part of the run returned; rules that it does not know start anew.
    """

    def __init__(self, rules: Sequence[GateSection], state: Mapping[str, RuleState] | None = None) -> None:
        saved = state or {}
        self._rules = [(rule, dataclasses.replace(saved.get(_name(rule), RuleState()))) for rule in rules]
        self._before: list[RuleState] = []

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Firing]:
        """The gates that fire on this step's metrics, the mildest action first.

        A metric that is missing or not finite leaves its rules as they were.
        """
        self._before = [dataclasses.replace(state) for _, state in self._rules]
        return _fire(step, self._rules, metrics)

    def recheck(self, step: int, metrics: Mapping[str, float]) -> list[Firing]:
        """The withholding gates that fire when these metrics take the place of those of the step's `check`.

        That one must not have withheld the step. The other gates, and those of other metrics, stay as it left them.
        """
        again = []
        for index, ((rule, _), before) in enumerate(zip(self._rules, self._before, strict=True)):
            if rule.action in WITHHOLDING and math.isfinite(metrics.get(rule.metric, math.nan)):
                self._rules[index] = rule, before
                again.append(self._rules[index])
        return _fire(step, again, metrics)

    def withholding(self) -> list[GateSection]:
        """The rules whose metric has not recovered and which let nothing be trained on until then."""
        return [rule for rule, state in self._rules if state.tripped and rule.action in WITHHOLDING]

    def state(self) -> dict[str, RuleState]:
        """The state, for a checkpoint."""
        return {_name(rule): dataclasses.replace(state) for rule, state in self._rules}


def _fire(step: int, rules: Sequence[tuple[GateSection, RuleState]], metrics: Mapping[str, float]) -> list[Firing]:
    fired = []
    for rule, state in rules:
        value = metrics.get(rule.metric, math.nan)
        if not math.isfinite(value):
            continue
        _advance(rule, state, value)
        if state.tripped and not state.fired and step > state.quiet_until:
            state.fired, state.quiet_until = True, step + rule.cooldown_steps
            fired.append(Firing(rule, value))
            if rule.action == "checkpoint_and_stop":
                state.beyond, state.tripped, state.fired = 0, False, False  # a run that is resumed is judged anew
    return sorted(fired, key=lambda firing: SEVERITY.index(firing.rule.action))


def _advance(rule: GateSection, state: RuleState, value: float) -> None:
    upper = rule.above is not None
    bound = rule.above if rule.above is not None else rule.below
    assert bound is not None
    state.beyond = state.beyond + 1 if (value > bound if upper else value < bound) else 0
    if state.beyond >= rule.for_steps:
        state.tripped = True
    recover = bound if rule.recover is None else rule.recover
    if value <= recover if upper else value >= recover:
        state.tripped = state.fired = False


def _name(rule: GateSection) -> str:
    return json.dumps(rule.model_dump(mode="json"), sort_keys=True)


# The verdict on a step.

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
