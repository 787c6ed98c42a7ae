"""The training loop. A step reads top to bottom: take, forward_backward, judge, update, sync, record."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from fp8rl.rl.guard.bias import BiasWindow
from fp8rl.rl.guard.gates import late_metrics
from fp8rl.rl.guard.guard import Guard
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.mismatch.logprobs import row_abs_diff_means
from fp8rl.rl.record.history import Event
from fp8rl.rl.record.metrics_log import StepClock
from fp8rl.rl.record.rollouts import RolloutRecord, ScoredRecord
from fp8rl.rl.record.run_dir import set_aside
from fp8rl.rl.run.batching import RolloutBatch
from fp8rl.rl.run.checkpoints import is_due
from fp8rl.rl.run.evaluation import Evaluation, agreement_on
from fp8rl.rl.run.feed.feed import ExampleFeed, Feed
from fp8rl.rl.run.run import Run
from fp8rl.rl.run.step import StepPass, fault_of, forward_backward, throughput
from fp8rl.trainer.step.batch import TokenBatch


def train(run: Run) -> str:
    """Train up to the run's last step, and export the trained model to `<run>/model`.

    Return why the run stopped before its last step, after a checkpoint; an empty text if it reached its last step.
    """
    experiment, trainer, record = run.experiment, run.trainer, run.record
    feed = (Feed if experiment.algorithm.samples else ExampleFeed)(experiment, run.sampling)
    guard = Guard(experiment, record.gate_state)
    evaluation = Evaluation(experiment, run.sampling, run.closing)
    if run.engines:
        _first_sync(run, evaluation, guard)
    if record.feed is not None:
        feed.restore(record.feed)
    last_row = record.last_row

    run.metrics()  # reset: what came before the first step belongs to no row
    clock, bias = StepClock(), BiasWindow()
    for step in record.steps():
        rollouts = feed.take(step, trainer.weight_version, clock, record.tracker.write)
        with run.turn("train"), clock.phase("train"):
            passed = forward_backward(trainer, rollouts, guard)  # gradients, which nothing has applied yet
        ahead = feed.ahead(clock)
        evaluated: dict[str, float] = {}
        if evaluation.under_way:
            with clock.phase("eval"):
                evaluated, _ = evaluation.finish()
        with run.turn("train"), clock.phase("monitor"):
            first = passed = passed.with_ahead(trainer, ahead)
            metrics = rollouts.metrics | first.train_metrics | first.mismatch | run.engines.canaries()
            metrics |= bias.add(first.monitored)
            capsule = None if first.monitored is None else record.capsule
            verdict = guard.judge(step, late_metrics(last_row) | metrics, first.fault, capsule)
            run.keep(verdict, first)
            if first.monitored is not None and not bool(first.monitored.fresh.any()):
                text = "found no token of the trainer's own weights to compare"
                record.announce(Event(step, "mismatch/tokens", 0.0, "at least 1", "go_on", None, text))
            if verdict.retry:  # a gate has changed the objective or the routes
                with clock.phase("train"):
                    passed = replace(forward_backward(trainer, rollouts, guard), ahead=first.ahead)
                verdict = guard.recheck(step, verdict, passed.train_metrics, passed.fault, capsule)
                run.keep(verdict, passed)
                metrics |= passed.train_metrics
        feed.drain(clock)
        with run.turn("train"), clock.phase("train"):
            if passed.plan is not None and not verdict.withheld:
                learned, error = passed.plan.update_all(trainer, passed.result, step)
                metrics |= learned
                if error is not None:  # a later update than the first failed; those before it stay
                    verdict = guard.recheck(step, verdict, {}, fault_of(error, rollouts.batch), None)
                    run.keep(verdict, None)
        with clock.phase("sync"):
            if verdict.fall_back:
                run.fall_back_to_bf16()
                feed.renew()
            updated = trainer.weight_version != passed.version
            if verdict.resync or (updated and (experiment.algorithm.samples or evaluation.is_due(step))):
                metrics |= run.sync().metrics()
        metrics |= guard.metrics(verdict) | evaluated
        if evaluation.is_due(step) and not (verdict.stop and evaluation.runs_in_background(step)):
            evaluation.begin(step)
            if not evaluation.runs_in_background(step):
                with clock.phase("eval"):
                    metrics |= evaluation.finish()[0]
        saves = is_due(experiment, step) or bool(verdict.stop)
        if saves:
            with clock.phase("checkpoint"):
                record.checkpoints.begin(trainer, record.gate_state, step, feed.state())
        metrics |= record.recoveries() | run.metrics() | clock.lap()
        metrics |= throughput(metrics, rollouts.batch)
        last_row = record.row(metrics, partial(step_records, first, passed.batch), saves)
        if verdict.stop:
            return verdict.stop
    if experiment.adapter is not None:
        set_aside(record.files.adapter)
        trainer.export_adapter(record.files.adapter)
    if experiment.adapter is None or experiment.adapter.mode == "merged":
        set_aside(record.files.model)
        trainer.export_hf(record.files.model)
    return ""


def _first_sync(run: Run, evaluation: Evaluation, guard: Guard) -> None:
    """Do a verified sync. In a new run, also record the row of step 0: accuracy and agreement before training.

    If the checkpoint's step ended with an evaluation in the background, a resumed run begins this evaluation again.
    """
    first, record = run.sync(), run.record
    record.console.note(f"first sync verified: {first.verified_tensors} tensors, {first.bytes / 1e6:.1f} MB")
    if record.step == 0:
        evaluation.begin(0)
        evaluated, greedy = evaluation.finish()
        with run.turn("train"):
            agreed = agreement_on(greedy, run.trainer, guard)
        metrics = first.metrics() | evaluated | agreed | run.engines.canaries()
        record.console.step(0, record.tracker.log(0, metrics))
    elif evaluation.is_due(record.step) and evaluation.runs_in_background(record.step):
        evaluation.begin(record.step)


def step_records(first: StepPass, batch: TokenBatch) -> tuple[list[RolloutRecord], list[ScoredRecord]]:
    """Return the records of a step's trajectories, and of the answers for later steps that were scored in this step.

    first: the step's first pass, whose log-probabilities are recorded. batch: the batch with its final advantages.
    """
    rollouts = replace(first.rollouts, batch=batch)
    return rollout_records(rollouts, first.result.logprobs), scored_records(first.ahead)


def rollout_records(rollouts: RolloutBatch, train_logprobs: Tensor) -> list[RolloutRecord]:
    """Return the records of a step's trajectories, in the order of the batch; none if nothing was sampled.

    train_logprobs: fp32 [B, S], the trainer's log-probabilities of the whole batch.
    """
    if not rollouts.answers or rollouts.outcomes is None:
        return []
    batch = rollouts.batch
    means = row_abs_diff_means(train_logprobs, batch.fields["rollout_logprobs"], batch.loss_mask)
    records: list[RolloutRecord] = []
    groups = rollouts.outcomes.groups.tolist()
    for row, (answer, group, mean) in enumerate(zip(rollouts.answers, groups, means, strict=True)):
        trajectory, sampled = answer.trajectory, batch.loss_mask[row]
        advantages = batch.fields["advantages"][row, sampled].tolist() if "advantages" in batch.fields else []
        records.append(
            RolloutRecord(
                prompt=answer.problem.question,
                text=answer.text,
                reward=answer.reward,
                abs_diff_mean=mean,
                group=group,
                seed=trajectory.seed,
                finished=trajectory.finished,
                prompt_ids=trajectory.prompt_ids,
                token_ids=trajectory.token_ids,
                rollout_logprobs=trajectory.logprobs,
                train_logprobs=train_logprobs[row, sampled].tolist(),
                weight_versions=trajectory.weight_versions,
                advantage=advantages[0] if advantages else None,
                reward_parts=answer.parts,
                told=list(trajectory.environment_spans),
                said=list(answer.said) if trajectory.environment_spans else [],
                outcome=trajectory.outcome,
                teacher_logprobs=answer.teacher_logprobs,
                supports=None if (kept := trajectory.supports) is None or kept.logprobs is not None else kept.lists(),
                reference=None if records and records[-1].group == group else answer.problem.answer,
            )
        )
    return records


def scored_records(ahead: ScoredBatch | None) -> list[ScoredRecord]:
    """Return records of the answers for later steps that were scored in this step; an empty list if there are none."""
    if ahead is None:
        return []
    batch, rollout = ahead.batch, ahead.batch.fields["rollout_logprobs"]
    return [
        ScoredRecord(
            token_ids=batch.tokens[row, : int(batch.lengths[row])].tolist(),
            sampled=sampled.nonzero().flatten().tolist(),
            rollout_logprobs=rollout[row, sampled].tolist(),
            train_logprobs=ahead.logprobs[row, sampled].tolist(),
            weight_versions=ahead.versions[row, sampled].tolist(),
        )
        for row, sampled in enumerate(batch.loss_mask)
    ]
