"""Makes the records of a step: its trajectories, and the answers to later steps that were scored beside them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.mismatch.logprobs import row_abs_diff_means
from fp8rl.rl.record.rollouts import RolloutRecord, ScoredRecord
from fp8rl.rl.run.feed.feed import RolloutBatch
from fp8rl.rl.run.step import StepPass
from fp8rl.trainer.step.batch import TokenBatch


def step_records(first: StepPass, batch: TokenBatch) -> tuple[list[RolloutRecord], list[ScoredRecord]]:
    """Record the trajectories of a step, and the answers to later steps that were scored beside them.

    first: the step's first pass, whose log-probabilities are recorded. batch: with the advantages of its last pass.
    """
    rollouts = replace(first.rollouts, batch=batch)
    return rollout_records(rollouts, first.result.logprobs), scored_records(first.ahead)


def rollout_records(rollouts: RolloutBatch, train_logprobs: Tensor) -> list[RolloutRecord]:
    """The trajectories of a step, in the order of the batch; none where nothing was sampled.

    train_logprobs: fp32 [B, S], of the pass over the whole batch.
    """
    if not rollouts.answers or rollouts.outcomes is None:
        return []
    batch = rollouts.batch
    means = row_abs_diff_means(train_logprobs, batch.fields["rollout_logprobs"], batch.loss_mask)
    records = []
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
                supports=None if trajectory.supports is None else trajectory.supports.lists(),
            )
        )
    return records


def scored_records(ahead: ScoredBatch | None) -> list[ScoredRecord]:
    """The answers to later steps that were scored beside a batch, in their order; none where there are none."""
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
