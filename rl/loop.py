"""The training loop. A step reads top to bottom: take a batch, train, compare, judge, update, sync, record."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from rl.algorithms.base import AlgorithmConfig, used_tokens
from rl.guard.evidence import Evidence
from rl.guard.gates import late_metrics
from rl.guard.judge import Fault, Guard
from rl.record.metrics_log import read_metrics
from rl.run.checkpoints import is_due
from rl.run.clock import StepClock
from rl.run.evaluation import Evaluation, agreement_on
from rl.run.feed.feed import Work, open_feed
from rl.run.learning import Lesson
from rl.run.records import rollout_records, throughput, train_metrics
from rl.run.run import Run
from trainer.actor import TrainerGroup
from trainer.errors import NonFiniteLossError
from trainer.step.batch import TokenBatch
from trainer.step.result import PassResult

Row = dict[str, float]


def train(run: Run) -> str:
    """Run the experiment's algorithm to its last step and export the trained model to `<run>/model`.

    Returns why the run stopped before its last step, after a checkpoint; empty if it did not.
    """
    experiment, stack, algorithm = run.experiment, run.stack, run.experiment.algorithm
    trainer = stack.trainer
    feed = open_feed(experiment, stack.sampling)
    if run.feed is not None:
        feed.restore(run.feed)
    guard = Guard(experiment.gates, experiment.guard, algorithm, run.standing, replays=stack.replays)
    evaluation = Evaluation(experiment, stack.sampling, stack.closing)
    if stack.engines:
        _begin(run, evaluation, guard.replays)
    row = _last_row(run)

    clock = StepClock()
    for step in range(run.step + 1, experiment.run.steps + 1):
        run.begin(step)
        version = trainer.weight_version
        work = feed.take(step, version, clock)

        with stack.turn("train"), clock.phase("train"):
            attempt = _attempt(trainer, work, guard.algorithm, replay=guard.replays)
        ahead = feed.ahead(clock)
        evaluated = _finished(evaluation, clock) if evaluation.under_way else {}
        # The scoring is of the trainer's weights before the first update: the training forward, where there is one
        # update alone. Where older ones have sampled the batch, answers to later steps show whether both sides agree.
        with stack.turn("train"), clock.phase("monitor"):
            fresh = _scored(trainer, ahead)
            attempt = attempt.beside(fresh)
            capsule = run.capsule if attempt.evidence is not None else None
            metrics = work.metrics | train_metrics(attempt.result, work.batch) | attempt.agreement()
            verdict = guard.judge(step, late_metrics(row) | metrics, attempt.fault, capsule)
            run.keep(verdict, attempt.evidence, attempt.faulty_rows)
        logprobs = attempt.result.logprobs

        with stack.turn("train"), clock.phase("train"):
            if verdict.repeat:
                attempt = _attempt(trainer, work, guard.algorithm, replay=guard.replays).beside(fresh)
                again = train_metrics(attempt.result, work.batch)
                metrics |= again
                verdict = guard.recheck(step, verdict, again, attempt.fault, capsule)
                run.keep(verdict, attempt.evidence, attempt.faulty_rows)
            if not verdict.withheld and attempt.lesson is not None:
                learnt, error = attempt.lesson.learn(trainer, attempt.result, step)
                metrics |= learnt
                if error is not None:  # in a later update than the first; those before it stay
                    verdict = guard.recheck(step, verdict, {}, _fault(error, work), None)
                    run.keep(verdict, None)
        evaluates = evaluation.is_due(step)
        with clock.phase("sync"):
            if verdict.fall_back:
                run.fall_back_to_bf16()
                feed.renew()
            trained = trainer.weight_version != version
            if verdict.resync or ((algorithm.samples or evaluates) and trained):
                metrics |= run.sync().metrics()
        metrics |= guard.metrics(verdict) | evaluated

        if evaluates and not (verdict.stop and evaluation.goes_beside(step)):
            evaluation.begin(step)
            if not evaluation.goes_beside(step):
                metrics |= _finished(evaluation, clock)
        if is_due(experiment, step) or verdict.stop:
            with clock.phase("checkpoint"):
                run.checkpoints.begin(trainer, run.standing, step, feed.state())
        row = _record(run, metrics, clock, dataclasses.replace(work, batch=attempt.batch), logprobs)
        if verdict.stop:
            return verdict.stop
    trainer.export_hf(run.files.model)
    return ""


@dataclass(frozen=True)
class Attempt:
    """A pass over a batch, or over the rows of its first update. With a `fault` there are no gradients to apply, and
    loss and norm are NaN.

    batch: the whole, with what it teaches. lesson: what its updates take; None where a fault came before.
    evidence: both sides' view of the batch; None where nothing was sampled.
    """

    batch: TokenBatch
    lesson: Lesson | None
    result: PassResult
    evidence: Evidence | None
    fault: Fault | None

    @property
    def faulty_rows(self) -> tuple[int, ...]:
        """Rows of the batch that a fault came from."""
        return self.fault.rows if self.fault is not None else ()

    def beside(self, fresh: Evidence | None) -> Attempt:
        """The same with what answers to later steps say; None: nothing."""
        if fresh is None or self.evidence is None:
            return self
        return dataclasses.replace(self, evidence=self.evidence.beside(fresh))

    def agreement(self) -> dict[str, float]:
        """`mismatch/...` and `drift/...` of the pass."""
        return self.evidence.metrics() if self.evidence is not None else {}


def _attempt(trainer: TrainerGroup, work: Work, algorithm: AlgorithmConfig, *, replay: bool) -> Attempt:
    """The gradients of a batch's first update, which may be applied; replay: at the engine's choice of experts."""
    batch, lesson, fault = dataclasses.replace(work.batch, replay=replay), None, None
    try:
        if not bool(used_tokens(batch).any()):
            raise NonFiniteLossError("found no finite rollout logprob, so check the engine", range(batch.rows))
        lesson = Lesson.of(trainer, batch, work.outcomes, algorithm)
        result = lesson.gradients(trainer, 0)
    except NonFiniteLossError as error:
        fault, scored = _fault(error, work), trainer.score_routed(batch)
        result = PassResult(scored.logprobs, {}, math.nan, math.nan, 0.0, scored.routes, scored.draws)
    evidence = None
    if work.versions is not None:
        at = trainer.weight_version
        seen = dataclasses.replace(batch, fields={"rollout_logprobs": batch.fields["rollout_logprobs"]})
        cap = algorithm.measured_cap
        evidence = Evidence(seen, work.versions, at, result.logprobs, result.routes, result.draws, cap)
    return Attempt(batch if lesson is None else lesson.batch, lesson, result, evidence, fault)


def _scored(trainer: TrainerGroup, ahead: Work | None) -> Evidence | None:
    """What both sides make of answers to later steps, at the weights that the trainer holds."""
    if ahead is None or ahead.versions is None:
        return None
    scored = trainer.score_routed(ahead.batch)
    return Evidence(ahead.batch, ahead.versions, trainer.weight_version, scored.logprobs, None, scored.draws)


def _fault(error: NonFiniteLossError, work: Work) -> Fault:
    rows = tuple(error.rows)
    if not bool(used_tokens(work.batch).any()):
        tokens = float(work.batch.loss_mask.sum())
        return Fault("mismatch/nonfinite_count", tokens, "every token", str(error), rows)
    what = str(error).partition(":")[0]  # loss, or gradient norm
    return Fault("train/loss", None, "not finite", f"the {what} over {len(rows)} rows is not finite", rows)


def _finished(evaluation: Evaluation, clock: StepClock) -> dict[str, float]:
    with clock.phase("eval"):
        metrics, _ = evaluation.finish()
    return metrics


def _begin(run: Run, evaluation: Evaluation, replay: bool) -> None:
    """The verified first sync, and in a new run the row of step 0: accuracy and agreement before training.

    A run that goes on begins again what went on beside its next step.
    """
    first = run.sync()
    run.console.note(f"first sync verified: {first.verified_tensors} tensors, {first.bytes / 1e6:.1f} MB")
    run.stack.engines.figures()  # from here on they count
    if run.step == 0:
        experiment, stack = run.experiment, run.stack
        evaluation.begin(0)
        evaluated, greedy = evaluation.finish()
        cap = experiment.algorithm.measured_cap
        metrics = first.metrics() | evaluated | agreement_on(greedy, stack.trainer, replay=replay, cap=cap)
        run.console.step(0, run.tracker.log(0, metrics))
    elif evaluation.is_due(run.step) and evaluation.goes_beside(run.step):
        evaluation.begin(run.step)


def _last_row(run: Run) -> Row:
    """What the step before the first one left, also in a run that is resumed."""
    rows = read_metrics(run.files.metrics)
    return rows[-1] if rows else {}


def _record(run: Run, metrics: dict[str, float], clock: StepClock, work: Work, logprobs: Tensor) -> Row:
    """Log the step, with which its checkpoint counts if it has one; the metrics as logged."""
    metrics |= run.mendings() | run.stack.engines.figures() | clock.lap()
    metrics |= throughput(metrics, work.batch)
    written = run.tracker.log(run.step, metrics, rollout_records(work, logprobs))
    run.console.step(run.step, written)
    run.checkpoints.recorded()
    return written
