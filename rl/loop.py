"""The training loops. A step reads top to bottom: sample, reward, train, compare, sync, record."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.advantages import group_advantages
from rl.batching import SftExample, batch_from_examples, batch_from_trajectories
from rl.checkpoints import is_due, publish_checkpoint, write_checkpoint
from rl.clock import StepClock
from rl.evaluation import evaluate
from rl.guard.gates import Gates, late_metrics
from rl.guard.judge import Guard, announce
from rl.metrics_log import read_metrics
from rl.mismatch import token_versions
from rl.objectives.sft import SftObjective
from rl.problems import of_step
from rl.records import rollout_metrics, samples_to_show, throughput, train_metrics
from rl.recovery import recovering
from rl.sampling import sample
from rl.spec.sections import GrpoAlgorithm, SftAlgorithm
from rl.stack import Stack, load_data
from rl.tracking import RolloutSample
from rollout.tasks import verify
from rollout.types import Prompt
from trainer.batch import TokenBatch
from weight_sync.bridge import SyncReport


def train(stack: Stack) -> str:
    """Run the spec's algorithm to its last step and export the trained model to `<run>/model`.

    Returns why the run stopped before its last step, after a checkpoint; empty if it did not.
    """
    if isinstance(stack.spec.algorithm, SftAlgorithm):
        stopped = _train_sft(stack, stack.spec.algorithm)
    else:
        stopped = _train_grpo(stack, stack.spec.algorithm)
    if not stopped:
        stack.trainer.export_hf(stack.run.model)
    return stopped


def _train_grpo(stack: Stack, algorithm: GrpoAlgorithm) -> str:
    spec, trainer = stack.spec, stack.trainer
    problems, held_out = load_data(spec)
    eval_prompts = stack.prompts(held_out)
    guard = Guard(stack, algorithm)
    sampling = stack.sampling(spec.rollout.temperature)
    _begin(stack, eval_prompts, guard.measured_cap)
    row = _last_row(stack)

    clock = StepClock()
    for step in range(stack.first_step, spec.run.steps + 1):
        prompts = stack.prompts(of_step(problems, step, spec.rollout.prompts_per_step, spec.run.seed))
        with clock.phase("rollout"):
            trajectories = sample(stack, prompts, spec.rollout.group_size, sampling)

        texts = [stack.text(trajectory) for trajectory in trajectories]
        rewards = torch.tensor(
            [
                verify(prompts[t.group].problem, text, t.finished, spec.data.reward)
                for t, text in zip(trajectories, texts, strict=True)
            ]
        )
        groups = torch.tensor([t.group for t in trajectories])
        metrics = rollout_metrics(trajectories, rewards, groups, trainer.weight_version)
        advantages = group_advantages(rewards, groups, normalize_std=algorithm.group_norm_std)
        batch = batch_from_trajectories(trajectories, advantages, spec.rollout.temperature)
        versions = token_versions(trajectories, batch.loss_mask)

        with clock.phase("train"):
            attempt = guard.attempt(batch, versions)
        # One update per batch: the training forward is the scoring at the weights that sampled the tokens.
        with clock.phase("monitor"):
            metrics |= train_metrics(attempt.result, batch) | attempt.evidence.metrics(guard.measured_cap)
            verdict = guard.judge(step, late_metrics(row) | metrics, attempt)

        with clock.phase("train"):
            if verdict.repeat:
                repeated = guard.attempt(batch, versions)
                again = train_metrics(repeated.result, batch)
                metrics |= again
                verdict = guard.recheck(step, verdict, again, repeated)
            if not verdict.withheld:
                metrics["train/lr"] = trainer.update()
        with clock.phase("sync"):
            if verdict.fall_back:
                stack.fall_back_to_bf16()
            if verdict.resync or not verdict.withheld:
                metrics |= _sync(stack, step).metrics()
        metrics |= guard.metrics(verdict)

        last = step == spec.run.steps
        if last or (spec.eval.every and step % spec.eval.every == 0):
            with clock.phase("eval"):
                metrics |= evaluate(stack, eval_prompts)
        due = is_due(spec, step) or bool(verdict.stop)
        if due:
            with clock.phase("checkpoint"):
                write_checkpoint(stack, step)
        samples = samples_to_show(prompts, trajectories, texts, rewards, attempt.evidence.logprobs, batch)
        row = _record(stack, step, metrics, clock, batch, due, samples)
        if verdict.stop:
            return verdict.stop
    return ""


def _train_sft(stack: Stack, algorithm: SftAlgorithm) -> str:
    spec, trainer = stack.spec, stack.trainer
    gates = Gates(spec.gates, stack.standing.rules)
    row = _last_row(stack)
    examples = [
        SftExample(prompt.token_ids, stack.answer_ids(prompt.problem)) for prompt in stack.prompts(load_data(spec)[0])
    ]
    clock = StepClock()
    for step in range(stack.first_step, spec.run.steps + 1):
        batch = batch_from_examples(of_step(examples, step, algorithm.batch_size, spec.run.seed))
        with clock.phase("train"):
            result = trainer.forward_backward(batch, SftObjective.for_batch(batch))
            metrics = train_metrics(result, batch) | {"train/lr": trainer.update()}
        announce(stack, [firing.event(step) for firing in gates.check(step, late_metrics(row) | metrics)])
        stack.standing.rules = gates.state()
        if is_due(spec, step):
            with clock.phase("checkpoint"):
                write_checkpoint(stack, step)
        row = _record(stack, step, metrics, clock, batch, is_due(spec, step))
    return ""


def _begin(stack: Stack, eval_prompts: list[Prompt], tis_cap: float) -> None:
    """The verified first sync, and on a new run the row of step 0: accuracy and agreement before training."""
    first = _sync(stack, stack.first_step - 1)
    stack.console.note(f"first sync verified: {first.verified_tensors} tensors, {first.bytes / 1e6:.1f} MB")
    if stack.first_step == 1:
        metrics = first.metrics() | evaluate(stack, eval_prompts, tis_cap=tis_cap)
        stack.console.step(0, stack.tracker.log(0, metrics))


def _last_row(stack: Stack) -> dict[str, float]:
    """What the step before the first one left, also in a run that is resumed."""
    rows = read_metrics(stack.run.metrics)
    return rows[-1] if rows else {}


def _sync(stack: Stack, step: int) -> SyncReport:
    bridge = stack.bridge
    assert bridge is not None
    stack.manifest = stack.run.manifest(step)
    return recovering(stack, lambda: bridge.sync(stack.endpoints(), stack.manifest))


def _record(
    stack: Stack,
    step: int,
    metrics: dict[str, float],
    clock: StepClock,
    batch: TokenBatch,
    due: bool,
    samples: Sequence[RolloutSample] = (),
) -> dict[str, float]:
    """Log the step, then publish its checkpoint if one was due; the metrics as written."""
    metrics |= clock.lap()
    metrics |= throughput(metrics, batch)
    written = stack.tracker.log(step, metrics, samples)
    stack.console.step(step, written)
    if due:
        publish_checkpoint(stack, step)
        clock.restart()
    return written
