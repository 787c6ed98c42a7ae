"""The training loops. A step reads top to bottom: sample, reward, train, compare, sync, record."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.advantages import group_advantages
from rl.batching import SftExample, batch_from_examples, batch_from_trajectories
from rl.checkpoints import is_due, publish_checkpoint, write_checkpoint
from rl.clock import StepClock
from rl.evaluation import evaluate
from rl.gates import Gates
from rl.mismatch import agreement
from rl.objectives.grpo import GrpoObjective
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


def train(stack: Stack) -> None:
    """Run the spec's algorithm to its last step and export the trained model to `<run>/model`."""
    if isinstance(stack.spec.algorithm, SftAlgorithm):
        _train_sft(stack, stack.spec.algorithm)
    else:
        _train_grpo(stack, stack.spec.algorithm)
    stack.trainer.export_hf(stack.run.model)


def _train_grpo(stack: Stack, algorithm: GrpoAlgorithm) -> None:
    spec, trainer = stack.spec, stack.trainer
    problems, held_out = load_data(spec)
    eval_prompts = stack.prompts(held_out)
    gates = Gates(spec.gates)
    tis_cap = algorithm.tis_cap or 2.0
    sampling = stack.sampling(spec.rollout.temperature)
    _begin(stack, eval_prompts)

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

        with clock.phase("train"):
            result = trainer.forward_backward(batch, GrpoObjective.for_batch(batch, algorithm))
            metrics |= train_metrics(result, batch) | {"train/lr": trainer.update()}

        # One update per batch: the training forward is the scoring at the weights that sampled the tokens.
        metrics |= agreement(result.logprobs, batch.fields["rollout_logprobs"], batch.loss_mask, tis_cap=tis_cap)
        for firing in gates.check(metrics):
            stack.warn(str(firing))

        with clock.phase("sync"):
            metrics |= _sync(stack, step).metrics()

        last = step == spec.run.steps
        if last or (spec.eval.every and step % spec.eval.every == 0):
            with clock.phase("eval"):
                metrics |= evaluate(stack, eval_prompts)
        if is_due(spec, step):
            with clock.phase("checkpoint"):
                write_checkpoint(stack, step)
        samples = samples_to_show(prompts, trajectories, texts, rewards, result.logprobs, batch)
        _record(stack, step, metrics, clock, batch, samples)


def _train_sft(stack: Stack, algorithm: SftAlgorithm) -> None:
    spec, trainer = stack.spec, stack.trainer
    examples = [
        SftExample(prompt.token_ids, stack.answer_ids(prompt.problem)) for prompt in stack.prompts(load_data(spec)[0])
    ]
    clock = StepClock()
    for step in range(stack.first_step, spec.run.steps + 1):
        batch = batch_from_examples(of_step(examples, step, algorithm.batch_size, spec.run.seed))
        with clock.phase("train"):
            result = trainer.forward_backward(batch, SftObjective.for_batch(batch))
            metrics = train_metrics(result, batch) | {"train/lr": trainer.update()}
        if is_due(spec, step):
            with clock.phase("checkpoint"):
                write_checkpoint(stack, step)
        _record(stack, step, metrics, clock, batch)


def _begin(stack: Stack, eval_prompts: list[Prompt]) -> None:
    """The verified first sync, and on a new run the row of step 0: accuracy and agreement before training."""
    first = _sync(stack, stack.first_step - 1)
    stack.console.note(f"first sync verified: {first.verified_tensors} tensors, {first.bytes / 1e6:.1f} MB")
    if stack.first_step == 1:
        metrics = first.metrics() | evaluate(stack, eval_prompts, compare=True)
        stack.console.step(0, stack.tracker.log(0, metrics))


def _sync(stack: Stack, step: int) -> SyncReport:
    bridge = stack.bridge
    assert bridge is not None
    return recovering(stack, lambda: bridge.sync(stack.endpoints(), stack.run.manifest(step)))


def _record(
    stack: Stack,
    step: int,
    metrics: dict[str, float],
    clock: StepClock,
    batch: TokenBatch,
    samples: Sequence[RolloutSample] = (),
) -> None:
    metrics |= clock.lap()
    metrics |= throughput(metrics, batch)
    stack.console.step(step, stack.tracker.log(step, metrics, samples))
    if is_due(stack.spec, step):
        publish_checkpoint(stack, step)
        clock.restart()
