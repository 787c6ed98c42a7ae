"""The gates of a run in action: what becomes of a step, decided before it is trained on, and what is kept of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from rl.guard.capsule import write_capsule
from rl.guard.events import Event, append_event
from rl.guard.evidence import Evidence
from rl.guard.gates import Firing, Gates
from rl.objectives.grpo import GrpoObjective, used_tokens
from rl.spec.contradictions import DEFAULT_TIGHT_CAP
from rl.spec.sections import GrpoAlgorithm
from rl.stack import Stack
from trainer.batch import TokenBatch
from trainer.errors import NonFiniteLossError
from trainer.result import PassResult

WITHOUT_TIS = 2.0
"""C of the clip fractions where the spec turns the importance weight off."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A pass over a batch. A `fault` says why there are no gradients to apply; loss and norm are NaN then."""

    result: PassResult
    evidence: Evidence
    fault: NonFiniteLossError | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What becomes of a step.

    fired: gates that fired. why: what gates and faults have said. withheld: the batch is not trained on. repeat: a
    gate changed the objective or the routes, so that the pass is done again before the update. resync: the engines are
    synced although the weights stay. fall_back: both sides go to BF16 before that. stop: why the run ends with this
    step, empty if it goes on.
    """

    fired: int
    why: tuple[str, ...]
    withheld: bool
    repeat: bool
    resync: bool
    fall_back: bool
    stop: str


class Guard:
    """Judges the steps of one run. What its gates change stands in `stack.standing`, which checkpoints carry."""

    def __init__(self, stack: Stack, algorithm: GrpoAlgorithm) -> None:
        self._stack, self._configured = stack, algorithm
        self._gates = Gates(stack.spec.gates, stack.standing.rules)
        self._stale_resyncs = 0  # in the step that was judged last
        self.measured_cap = algorithm.tis_cap or WITHOUT_TIS
        """C of the clip fractions. A gate that tightens the cap leaves it alone, lest it fire for its own doing."""

    @property
    def algorithm(self) -> GrpoAlgorithm:
        """The algorithm with the cap in force."""
        cap, tightened = self._configured.tis_cap, self._stack.standing.tis_cap
        if cap is None or tightened is None:
            return self._configured
        return self._configured.model_copy(update={"tis_cap": min(cap, tightened)})

    @property
    def _replays(self) -> bool:
        return self._stack.standing.replays(self._stack.numerics)

    def attempt(self, batch: TokenBatch, versions: Tensor) -> Attempt:
        """The gradients of a batch, with the cap and the routes that are in force; `update` may apply them.

        versions: int64 [B, S], the weight version that sampled each token.
        """
        trainer, batch = self._stack.trainer, dataclasses.replace(batch, replay=self._replays)
        fault = None
        try:
            if not bool(used_tokens(batch).any()):
                raise NonFiniteLossError("found no finite rollout logprob, so check the engine", range(batch.rows))
            result = trainer.forward_backward(batch, GrpoObjective.for_batch(batch, self.algorithm))
        except NonFiniteLossError as error:
            fault, scored = error, trainer.score_routed(batch)
            result = PassResult(scored.logprobs, {}, math.nan, math.nan, 0.0, scored.routes)
        evidence = Evidence(batch, versions, trainer.weight_version, result.logprobs, result.routes)
        return Attempt(result, evidence, fault)

    def judge(self, step: int, metrics: Mapping[str, float], attempt: Attempt) -> Verdict:
        """Decide about a step on its metrics so far.

        If a gate fires, or the attempt has a fault, the step's worst sequences become a capsule.
        """
        self._note_stale_resyncs(step)
        return self._decide(step, self._gates.check(step, metrics), attempt)

    def recheck(self, step: int, verdict: Verdict, metrics: Mapping[str, float], repeated: Attempt) -> Verdict:
        """The verdict after the pass that it asked for, which may break a bound too, or come to nothing.

        metrics: `train/...` of that pass.
        """
        again = self._decide(step, self._gates.recheck(step, metrics), repeated, verdict.why)
        return dataclasses.replace(again, fired=verdict.fired + again.fired)

    def metrics(self, verdict: Verdict) -> dict[str, float]:
        """`gates/...` of a step."""
        standing = self._stack.standing
        values = {
            "gates/fired": float(verdict.fired),
            "gates/withheld": float(verdict.withheld),
            "gates/router_replay": float(self._replays),
            "gates/bf16": float(standing.bf16),
            "gates/stale_resyncs": float(self._stale_resyncs),
        }
        cap = self.algorithm.tis_cap
        return values if cap is None else values | {"gates/tis_cap": cap}

    def _decide(self, step: int, firings: Sequence[Firing], attempt: Attempt, why: tuple[str, ...] = ()) -> Verdict:
        """Take the actions that last, and keep the case. `why`: what the step's earlier pass has said."""
        stack = self._stack
        events = self._record(step, [firing.event(step) for firing in firings], attempt, why)
        changed = [self._apply(firing) for firing in firings]
        stack.standing.rules = self._gates.state()

        actions = {event.action for event in events}
        stops, faulty = "checkpoint_and_stop" in actions, attempt.fault is not None
        withheld = stops or faulty or bool(self._gates.withholding())
        return Verdict(
            fired=len(firings),
            why=(*why, *(event.text for event in events)),
            withheld=withheld,
            repeat=any(changed) and not withheld,
            resync=bool(actions & {"resync", "bf16_both"}),
            fall_back="bf16_both" in actions and not stack.standing.bf16,
            stop=_stop(events),
        )

    def _apply(self, firing: Firing) -> bool:
        """Take the actions that last; whether the objective or the routes are others now."""
        before = self.algorithm.tis_cap, self._replays
        standing, rule = self._stack.standing, firing.rule
        if rule.action == "tighten_tis":
            standing.tis_cap = min(rule.tis_cap or DEFAULT_TIGHT_CAP, standing.tis_cap or math.inf)
        if rule.action == "enable_r3":
            standing.router_replay = True
        return before != (self.algorithm.tis_cap, self._replays)

    def _record(self, step: int, events: list[Event], attempt: Attempt, why: tuple[str, ...]) -> list[Event]:
        """Announce the events, and that of a fault, with a capsule for all of them."""
        if attempt.fault is not None:
            events = [*events, self._fault(step, attempt.fault, attempt.evidence.batch)]
        if events:
            capsule = self._keep(step, [*why, *(event.text for event in events)], attempt)
            events = [dataclasses.replace(event, capsule=capsule) for event in events]
            announce(self._stack, events)
        return events

    def _fault(self, step: int, fault: NonFiniteLossError, batch: TokenBatch) -> Event:
        action = "skip_step" if self._stack.spec.guard.nonfinite_loss == "skip" else "checkpoint_and_stop"
        if not bool(used_tokens(batch).any()):
            tokens = float(batch.loss_mask.sum())
            return Event(step, "mismatch/nonfinite_count", tokens, "every token", action, None, f"{action}: {fault}")
        what = str(fault).partition(":")[0]  # loss, or gradient norm
        text = f"{action}: the {what} over {len(fault.rows)} rows is not finite"
        return Event(step, "train/loss", None, "not finite", action, None, text)

    def _keep(self, step: int, why: Sequence[str], attempt: Attempt) -> str:
        """Write the capsule: the rows that a fault names and the worst of the others. Its path below the run's."""
        named = attempt.fault.rows if attempt.fault is not None else []
        worst = attempt.evidence.worst_rows(self._stack.spec.guard.capsule_sequences)
        rows = list(dict.fromkeys([*named, *worst]))
        path = write_capsule(self._stack, step, why, attempt.evidence, rows, self.measured_cap)
        return str(path.relative_to(self._stack.run.path))

    def _note_stale_resyncs(self, step: int) -> None:
        """Record, where there is a step to name, that engines were synced while it was sampled."""
        standing = self._stack.standing
        self._stale_resyncs, standing.stale_resyncs = standing.stale_resyncs, 0
        if self._stale_resyncs:
            text = "resync: tokens were sampled at stale weights, and again after a sync"
            event = Event(step, "gates/stale_resyncs", float(self._stale_resyncs), "above 0", "resync", None, text)
            append_event(self._stack.run.events, event)


def _stop(events: Sequence[Event]) -> str:
    """Why these events end the run, empty if none does."""
    return "; ".join(f"{event.text} ({event.capsule})" for event in events if event.action == "checkpoint_and_stop")


def announce(stack: Stack, events: Sequence[Event]) -> None:
    """Say them on the console, in wandb and in events.jsonl."""
    for event in events:
        stack.warn(event.text if event.capsule is None else f"{event.text} ({event.capsule})")
        append_event(stack.run.events, event)
