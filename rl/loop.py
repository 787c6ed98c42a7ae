"""The training loop. A step reads top to bottom: take, train, compare, decide, update, sync, record."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from fp8rl.rl.algorithms.base import used_tokens
from fp8rl.rl.guard.gates import late_metrics
from fp8rl.rl.guard.judge import Fault, Guard, Verdict
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.run.checkpoints import is_due
from fp8rl.rl.run.clock import StepClock
from fp8rl.rl.run.evaluation import Evaluation, agreement_on
from fp8rl.rl.run.feed.feed import Feed, RolloutBatch, open_feed
from fp8rl.rl.run.learning import Lesson
from fp8rl.rl.run.records import rollout_records, scored_records, throughput, train_metrics
from fp8rl.rl.run.run import LiveRun
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.result import NonFiniteLossError, PassResult

Row = dict[str, float]


def train(run: LiveRun) -> str:
    """Run the experiment's algorithm to its last step and export the trained model to `<run>/model`.

    Returns why the run stopped before its last step, after a checkpoint; empty if it did not.
    """
    experiment, stack, trainer = run.experiment, run.stack, run.stack.trainer
    feed = open_feed(experiment, stack.sampling)
    if run.feed is not None:
        feed.restore(run.feed)
    guard = Guard(experiment.gates, experiment.guard, experiment.algorithm, run.gate_state, replays=stack.replays)
    evaluation = Evaluation(experiment, stack.sampling, stack.closing)
    if stack.engines:
        _begin(run, evaluation, guard.replays)
    before = _last_row(run)

    clock = StepClock()
    for step in range(run.step + 1, experiment.run.steps + 1):
        run.begin(step)
        rollouts = feed.take(step, trainer.weight_version, clock, run.tracker.write)
        with stack.turn("train"), clock.phase("train"):
            attempt = Attempt.of(trainer, rollouts, guard)
        ahead = feed.ahead(clock)
        evaluated = _finished(evaluation, clock) if evaluation.under_way else {}
        with stack.turn("train"), clock.phase("monitor"):
            attempt = attempt.beside(_scored(trainer, ahead, attempt.scored))
            decision = decide(run, guard, attempt, late_metrics(before), clock)
        feed.drain(clock)
        with stack.turn("train"), clock.phase("train"):
            decision = _update(run, guard, decision)
        with clock.phase("sync"):
            synced = _sync(run, feed, decision, needed=evaluation.is_due(step))
        metrics = decision.metrics | synced | guard.metrics(decision.verdict) | evaluated
        if evaluation.is_due(step):
            metrics |= _evaluate(evaluation, step, decision.verdict, clock)
        if is_due(experiment, step) or decision.verdict.stop:
            with clock.phase("checkpoint"):
                run.checkpoints.begin(trainer, run.gate_state, step, feed.state())
        before = _record(run, metrics, clock, decision)
        if decision.verdict.stop:
            return decision.verdict.stop
    if experiment.adapter is not None:
        trainer.export_adapter(run.files.adapter)
    if experiment.adapter is None or experiment.adapter.mode == "merged":
        trainer.export_hf(run.files.model)
    return ""


@dataclass(frozen=True)
class Attempt:
    """A pass over a step's batch, or over the rows of its first update. With a `fault` there are no gradients to apply,
    and loss and norm are NaN.

    Attributes:
        version: the trainer's weights in it, which no update has changed yet.
        lesson: what the updates take; None where a fault came before.
        scored: the batch as both sides saw it; None where nothing was sampled.
        ahead: their view of answers to later steps; None where there are none.
    """

    rollouts: RolloutBatch
    batch: TokenBatch
    version: int
    lesson: Lesson | None
    result: PassResult
    scored: ScoredBatch | None
    fault: Fault | None
    ahead: ScoredBatch | None = None

    @classmethod
    def of(cls, trainer: TrainerGroup, rollouts: RolloutBatch, guard: Guard) -> Attempt:
        """The gradients of a batch's first update, which may be applied, by the algorithm and the routes in force."""
        batch, lesson, fault = dataclasses.replace(rollouts.batch, replay=guard.replays), None, None
        version = trainer.weight_version
        try:
            if not bool(used_tokens(batch).any()):
                raise NonFiniteLossError("found no finite rollout logprob, so check the engine", range(batch.rows))
            lesson = Lesson.of(trainer, batch, rollouts.outcomes, guard.algorithm)
            result = lesson.gradients(trainer, 0)
        except NonFiniteLossError as error:
            fault, first = _fault(error, rollouts), trainer.score_routed(batch)
            result = PassResult(first.logprobs, {}, math.nan, math.nan, 0.0, first.routes, first.draws)
        scored = None
        if rollouts.versions is not None:
            seen = dataclasses.replace(batch, fields={"rollout_logprobs": batch.fields["rollout_logprobs"]})
            cap = guard.algorithm.measured_cap
            scored = ScoredBatch(seen, rollouts.versions, version, result.logprobs, result.routes, result.draws, cap)
        return cls(rollouts, batch if lesson is None else lesson.batch, version, lesson, result, scored, fault)

    def beside(self, ahead: ScoredBatch | None) -> Attempt:
        """The same with what answers to later steps say."""
        return dataclasses.replace(self, ahead=ahead)

    @cached_property
    def seen(self) -> ScoredBatch | None:
        """What shows whether both sides agree: the batch, and answers to later steps."""
        return self.scored if self.scored is None or self.ahead is None else self.scored.beside(self.ahead)

    @property
    def train_metrics(self) -> Row:
        return train_metrics(self.result, self.rollouts.batch)

    @property
    def agreement(self) -> Row:
        """`mismatch/...` of all that was scored, and `drift/...` of what is trained on."""
        if self.scored is None or self.seen is None:
            return {}
        return self.seen.metrics() | self.scored.drift()


@dataclass(frozen=True)
class Decision:
    """What becomes of a step.

    attempt: the pass whose gradients may be applied. metrics: of the step so far; those of agreement are of the step's
    first pass. first: that pass.
    """

    attempt: Attempt
    verdict: Verdict
    metrics: Row
    first: Attempt


def decide(run: LiveRun, guard: Guard, attempt: Attempt, before: Row, clock: StepClock) -> Decision:
    """Judge a pass before its update; where a gate changes objective or routes, do it again and judge that one too.

    before: what the step before has measured too late to be judged then.
    """
    metrics = attempt.rollouts.metrics | attempt.train_metrics | attempt.agreement | run.stack.engines.canaries()
    capsule = None if attempt.seen is None else run.capsule
    verdict = guard.judge(run.step, before | metrics, attempt.fault, capsule)
    run.keep(verdict, attempt.seen, _rows(attempt.fault))
    if not verdict.repeat:
        return Decision(attempt, verdict, metrics, attempt)
    with clock.phase("train"):
        again = Attempt.of(run.stack.trainer, attempt.rollouts, guard).beside(attempt.ahead)
    verdict = guard.recheck(run.step, verdict, again.train_metrics, again.fault, capsule)
    run.keep(verdict, again.seen, _rows(again.fault))
    return Decision(again, verdict, metrics | again.train_metrics, attempt)


def _update(run: LiveRun, guard: Guard, decision: Decision) -> Decision:
    """Apply the updates, unless they are withheld."""
    attempt, verdict = decision.attempt, decision.verdict
    if verdict.withheld or attempt.lesson is None:
        return decision
    learnt, error = attempt.lesson.learn(run.stack.trainer, attempt.result, run.step)
    if error is not None:  # in a later update than the first; those before it stay
        verdict = guard.recheck(run.step, verdict, {}, _fault(error, attempt.rollouts), None)
        run.keep(verdict, None)
    return dataclasses.replace(decision, verdict=verdict, metrics=decision.metrics | learnt)


def _sync(run: LiveRun, feed: Feed, decision: Decision, *, needed: bool) -> Row:
    """Bring the engines to the trainer's weights, where these have changed and are sampled from, or a gate asks for it.

    needed: an algorithm that samples nothing evaluates now.
    """
    if decision.verdict.fall_back:
        run.fall_back_to_bf16()
        feed.renew()
    trained = run.stack.trainer.weight_version != decision.attempt.version
    sampled = run.experiment.algorithm.samples or needed
    return run.sync().metrics() if decision.verdict.resync or (sampled and trained) else {}


def _scored(trainer: TrainerGroup, ahead: RolloutBatch | None, beside: ScoredBatch | None) -> ScoredBatch | None:
    """What both sides make of answers to later steps, at the weights that the trainer holds.

    Where older weights have sampled the batch, these answers show whether both sides agree.
    """
    if ahead is None or ahead.versions is None or beside is None:
        return None
    scored = trainer.score_routed(ahead.batch)
    version = trainer.weight_version
    return ScoredBatch(ahead.batch, ahead.versions, version, scored.logprobs, None, scored.draws, beside.cap)


def _fault(error: NonFiniteLossError, rollouts: RolloutBatch) -> Fault:
    rows = tuple(error.rows)
    if not bool(used_tokens(rollouts.batch).any()):
        tokens = float(rollouts.batch.loss_mask.sum())
        return Fault("mismatch/nonfinite_count", tokens, "every token", str(error), rows)
    what = str(error).partition(":")[0]  # loss, or gradient norm
    return Fault("train/loss", None, "not finite", f"the {what} over {len(rows)} rows is not finite", rows)


def _rows(fault: Fault | None) -> tuple[int, ...]:
    """Rows of the batch that a fault came from."""
    return () if fault is None else fault.rows


def _evaluate(evaluation: Evaluation, step: int, verdict: Verdict, clock: StepClock) -> Row:
    """Begin the step's evaluation, and wait for it unless it goes on beside the next step."""
    beside = evaluation.goes_beside(step)
    if verdict.stop and beside:
        return {}
    evaluation.begin(step)
    return {} if beside else _finished(evaluation, clock)


def _finished(evaluation: Evaluation, clock: StepClock) -> dict[str, float]:
    with clock.phase("eval"):
        metrics, _ = evaluation.finish()
    return metrics


def _begin(run: LiveRun, evaluation: Evaluation, replay: bool) -> None:
    """The verified first sync, and in a new run the row of step 0: accuracy and agreement before training.

    A run that goes on begins again what went on beside its next step.
    """
    first = run.sync()
    run.console.note(f"first sync verified: {first.verified_tensors} tensors, {first.bytes / 1e6:.1f} MB")
    run.stack.figures()  # from here on they count
    if run.step == 0:
        experiment, stack = run.experiment, run.stack
        evaluation.begin(0)
        evaluated, greedy = evaluation.finish()
        cap = experiment.algorithm.measured_cap
        with stack.turn("train"):
            agreed = agreement_on(greedy, stack.trainer, replay=replay, cap=cap)
        metrics = first.metrics() | evaluated | agreed | stack.engines.canaries()
        run.console.step(0, run.tracker.log(0, metrics))
    elif evaluation.is_due(run.step) and evaluation.goes_beside(run.step):
        evaluation.begin(run.step)


def _last_row(run: LiveRun) -> Row:
    """What the step before the first one left, also in a run that is resumed."""
    rows = read_metrics(run.files.metrics)
    return rows[-1] if rows else {}


def _record(run: LiveRun, metrics: Row, clock: StepClock, decision: Decision) -> Row:
    """Log the step, with which its checkpoint counts if it has one; the metrics as logged."""
    first, rollouts = decision.first, dataclasses.replace(decision.attempt.rollouts, batch=decision.attempt.batch)
    metrics |= run.mendings() | run.stack.figures() | clock.lap()
    metrics |= throughput(metrics, rollouts.batch)
    written = run.tracker.log(
        run.step, metrics, lambda: (rollout_records(rollouts, first.result.logprobs), scored_records(first.ahead))
    )
    run.console.step(run.step, written)
    if is_due(run.experiment, run.step) or decision.verdict.stop:
        run.tracker.wait()
    run.checkpoints.recorded()
    return written
