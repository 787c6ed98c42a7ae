"""The passes and updates of a step: score the batch, plan its updates, run forward and backward, update."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from fp8rl.numerics.sampling import EVERY_TOKEN
from fp8rl.rl.algorithms.base import AlgorithmConfig, Outcomes, used_tokens
from fp8rl.rl.guard.guard import Fault, Guard
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.run.batching import RolloutBatch
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.step.batch import NonFiniteLossError, PassResult, Scored, TokenBatch


@dataclass(frozen=True)
class StepPass:
    """A forward and backward pass over a step's batch, or over the rows of its first update; nothing is applied yet.

    With a `fault` there are no gradients to apply, and loss and norm are NaN.
    """

    rollouts: RolloutBatch
    batch: TokenBatch
    """The batch of `rollouts` with the fields that the algorithm learns from."""
    version: int
    """The trainer's weight version in the pass."""
    plan: UpdatePlan | None
    """The updates that the batch gets; None if a fault came before they were planned."""
    result: PassResult
    scored: ScoredBatch | None
    """The batch with both sides' scores; None if nothing was sampled."""
    fault: Fault | None
    ahead: ScoredBatch | None = None
    """Answers to later steps with both sides' scores; None if there are none."""

    @cached_property
    def monitored(self) -> ScoredBatch | None:
        """The tokens that show whether both sides agree: the batch, and answers to later steps."""
        return self.scored if self.scored is None or self.ahead is None else self.scored.followed_by(self.ahead)

    @property
    def train_metrics(self) -> dict[str, float]:
        return ({} if self.plan is None else self.plan.metrics) | train_metrics(self.result, self.rollouts.batch)

    @property
    def mismatch(self) -> dict[str, float]:
        """`mismatch/...` of all that was scored, and `drift/...` of the batch."""
        if self.scored is None or self.monitored is None:
            return {}
        return self.monitored.metrics() | self.scored.drift()

    def with_ahead(self, trainer: TrainerGroup, ahead: RolloutBatch | None) -> StepPass:
        """Score answers to later steps too, at the weights of this pass.

        If older weights have sampled the batch, only these answers show whether both sides agree.
        """
        if ahead is None or ahead.versions is None or self.scored is None:
            return self
        scored, cap = trainer.score_routed(ahead.batch), self.scored.tis_cap
        return replace(self, ahead=ScoredBatch.of(ahead.batch, ahead.versions, trainer.weight_version, scored, cap))


def forward_backward(trainer: TrainerGroup, rollouts: RolloutBatch, guard: Guard) -> StepPass:
    """Score a batch and compute the gradients of its first update, with the guard's present algorithm and replay."""
    batch, plan, fault = replace(rollouts.batch, replay=guard.replays), None, None
    version = trainer.weight_version
    try:
        if not bool(used_tokens(batch).any()):
            raise NonFiniteLossError("found no finite rollout logprob, so check the engine", range(batch.rows))
        plan = plan_updates(trainer, batch, rollouts.outcomes, guard.algorithm)
        result = plan.forward_backward(trainer, 0)
    except NonFiniteLossError as error:
        fault, alone = fault_of(error, rollouts.batch), trainer.score_routed(batch)
        result = PassResult(**vars(alone))
    scored = None
    if rollouts.versions is not None:
        sampled = replace(batch, fields={"rollout_logprobs": batch.fields["rollout_logprobs"]})
        scored = ScoredBatch.of(sampled, rollouts.versions, version, result, guard.tis_cap)
    return StepPass(rollouts, batch if plan is None else plan.batch, version, plan, result, scored, fault)


def fault_of(error: NonFiniteLossError, batch: TokenBatch) -> Fault:
    """Describe why a pass over a batch gave no gradients."""
    rows = tuple(error.rows)
    if not bool(used_tokens(batch).any()):
        return Fault("mismatch/nonfinite_count", float(batch.loss_mask.sum()), "every token", str(error), rows)
    culprit = str(error).partition(":")[0]  # loss, or gradient norm
    return Fault("train/loss", None, "not finite", f"the {culprit} over {len(rows)} rows is not finite", rows)


@dataclass(frozen=True)
class UpdatePlan:
    """A scored batch, split into the mini-batches of its optimizer steps."""

    algorithm: AlgorithmConfig
    batch: TokenBatch
    """The whole batch, with the fields that the algorithm learns from."""
    parts: list[list[int]]
    """The rows of each update."""
    scored: Scored | None
    """The policy's scores before the first update; None if the first pass computes them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the algorithm has computed together with the advantages."""

    def forward_backward(self, trainer: TrainerGroup, number: int) -> PassResult:
        """Compute the gradients of update `number`, counted from 0, for policy and critic.

        The result has the log-probabilities of the whole batch before the first update.
        Raises NonFiniteLossError: naming rows of the whole batch.
        """
        rows = self.parts[number]
        part = self.batch if self.scored is None else replace(self.batch.select(rows), seeds=None)
        try:
            result = trainer.forward_backward(part, self.algorithm.objective(part))
            if self.algorithm.needs.critic:
                critic = trainer.forward_backward(_unrouted(part), self.algorithm.critic_objective(part), "critic")
                norms = {"critic/loss": critic.loss, "critic/grad_norm": critic.grad_norm}
                # Of a metric that both passes have, the policy's value stays.
                result = replace(result, metrics=critic.metrics | result.metrics | norms)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(str(error), [rows[row] for row in error.rows]) from error
        if self.scored is None:
            return result
        return replace(result, logprobs=self.scored.logprobs, routes=self.scored.routes, draws=self.scored.draws)

    def update(self, trainer: TrainerGroup, step: int) -> dict[str, float]:
        """Apply the last gradients and return the learning rates; in the critic's warm-up apply only the critic's."""
        rates = {}
        if self.algorithm.learns(step):
            rates["train/lr"] = trainer.update()
        if self.algorithm.needs.critic:
            rates["critic/lr"] = trainer.update("critic")
        return rates

    def update_all(
        self, trainer: TrainerGroup, first: PassResult, step: int
    ) -> tuple[dict[str, float], NonFiniteLossError | None]:
        """Apply the first update's gradients, then compute and apply the other updates' gradients.

        Returns:
            `train/...` and `critic/...` as means over the updates; and the error of a later pass, if one failed: its
            update and all later ones are left out.
        """
        passes, rates, error = [first], self.update(trainer, step), None
        for number in range(1, len(self.parts)):
            try:
                passes.append(self.forward_backward(trainer, number))
            except NonFiniteLossError as found:
                error = found
                break
            rates = self.update(trainer, step)
        mean = replace(
            first,
            loss=fmean(done.loss for done in passes),
            grad_norm=fmean(done.grad_norm for done in passes),
            metrics={name: fmean(done.metrics[name] for done in passes) for name in first.metrics},
        )
        metrics = self.metrics | train_metrics(mean, self.batch)
        if self.algorithm.needs.critic:
            used = used_tokens(self.batch)
            values, returns = (self.batch.fields[name][used].double() for name in ("values", "returns"))
            metrics["critic/explained_variance"] = explained_variance(values, returns)
        metrics |= rates
        if error is None and (survival := trainer.update_survival()) is not None:
            metrics["train/update_survival"] = survival
        return metrics, error


def plan_updates(
    trainer: TrainerGroup, batch: TokenBatch, outcomes: Outcomes | None, algorithm: AlgorithmConfig
) -> UpdatePlan:
    """Score the batch as the algorithm asks, add the fields that it learns from, and split the rows into updates.

    outcomes: the rewards of sampled answers; None for examples.
    Raises NonFiniteLossError: a score of a used token is not finite.
    """
    needs, scored, used = algorithm.needs, None, used_tokens(batch)
    scores = {}
    if needs.old_logprobs or algorithm.updates > 1:  # also for a user's class whose `needs` leaves them out
        scored = trainer.score_routed(batch)
        scores["old_logprobs"] = scored.logprobs
    if needs.reference:
        scores["reference_logprobs"] = trainer.score(_unrouted(batch), "reference")
    if needs.critic:
        scores["values"] = trainer.score(_unrouted(batch), "critic")
    for name, values in scores.items():
        bad = (used & ~values.isfinite()).any(dim=1).nonzero().flatten().tolist()
        if bad:
            raise NonFiniteLossError(f"{name}: found values that are not finite in rows {bad}, expected numbers", bad)
    batch = batch.with_fields(**scores)
    if outcomes is None:
        return UpdatePlan(algorithm, batch, algorithm.mini_batches(torch.arange(batch.rows)), scored)
    batch = batch.with_fields(**algorithm.training_fields(outcomes, batch))
    parts = [rows for rows in algorithm.mini_batches(outcomes.groups) if bool(used[rows].any())]
    return UpdatePlan(algorithm, batch, parts, scored, outcomes.metrics)


def train_metrics(result: PassResult, batch: TokenBatch) -> dict[str, float]:
    """Return `train/...` of a pass over the batch, or of the mean of several passes."""
    metrics = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/tokens": float(batch.loss_mask.sum()),
        **result.metrics,
    }
    if "rollout_logprobs" in batch.fields:
        metrics["train/dropped_tokens"] = float((batch.loss_mask & ~used_tokens(batch)).sum())
    return metrics


def throughput(metrics: dict[str, float], batch: TokenBatch) -> dict[str, float]:
    """Return the tokens per second of each phase whose seconds are in `metrics`."""
    rates = {"perf/train_tokens_per_second": float(batch.lengths.sum()) / metrics["perf/train_seconds"]}
    if metrics.get("perf/sampling_seconds"):  # 0 where a checkpoint brought all answers
        rates["perf/rollout_tokens_per_second"] = metrics["rollout/tokens"] / metrics["perf/sampling_seconds"]
    return rates


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - variance(returns - values) / variance(returns): 1 for perfect predictions, 0 for a critic that only knows the
    mean; 0 if all returns are equal. values, returns: float64 [N]."""
    spread = returns.var(correction=0)
    return 0.0 if spread == 0 else float(1.0 - (returns - values).var(correction=0) / spread)


def _unrouted(batch: TokenBatch) -> TokenBatch:
    """Return the batch for a model that did not sample it: without routes, truncated sampling or draws."""
    return replace(batch, routes=None, replay=False, seeds=None, truncation=EVERY_TOKEN, supports=None)
