"""How a step learns from its batch: what is scored beforehand, which rows each update takes, what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from fp8rl.numerics.sampling import EVERY_TOKEN
from fp8rl.rl.algorithms.base import AlgorithmConfig, Outcomes, used_tokens
from fp8rl.rl.run.records import train_metrics
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.result import NonFiniteLossError, PassResult, Scored


@dataclass(frozen=True)
class Lesson:
    """A scored batch, split into the mini-batches of its optimizer steps.

    Attributes:
        batch: the whole, with the fields that the algorithm learns from.
        parts: the rows of each update.
        scored: the policy's scoring before the first update; None where the first pass is that.
    """

    algorithm: AlgorithmConfig
    batch: TokenBatch
    parts: list[list[int]]
    scored: Scored | None

    @classmethod
    def of(
        cls, trainer: TrainerGroup, batch: TokenBatch, outcomes: Outcomes | None, algorithm: AlgorithmConfig
    ) -> Lesson:
        """Score the batch as the algorithm asks, and let it say what there is to learn. outcomes: of what was sampled.

        Raises:
            NonFiniteLossError: a score of a used token is not finite.
        """
        needs, scored, used = algorithm.needs, None, used_tokens(batch)
        scores = {}
        if needs.old_logprobs:
            scored = trainer.score_routed(batch)
            scores["old_logprobs"] = scored.logprobs
        if needs.reference:
            scores["reference_logprobs"] = trainer.score(_alone(batch), "reference")
        if needs.critic:
            scores["values"] = trainer.score(_alone(batch), "critic")
        for name, values in scores.items():
            _check_finite(name, values, used)
        batch = batch.with_fields(**scores)
        if outcomes is None:
            return cls(algorithm, batch, algorithm.mini_batches(torch.arange(batch.rows)), scored)
        batch = batch.with_fields(**algorithm.lesson(outcomes, batch))
        parts = [rows for rows in algorithm.mini_batches(outcomes.groups) if bool(used[rows].any())]
        return cls(algorithm, batch, parts, scored)

    def gradients(self, trainer: TrainerGroup, number: int) -> PassResult:
        """Gradients of update `number`, counted from 0, for policy and critic; the log-probabilities are those of
        the whole batch before the first.

        Raises:
            NonFiniteLossError: naming rows of the whole batch.
        """
        rows = self.parts[number]
        part = self.batch if self.scored is None else replace(self.batch.select(rows), seeds=None)
        try:
            result = trainer.forward_backward(part, self.algorithm.objective(part))
            if self._has_critic:
                critic = trainer.forward_backward(_alone(part), self.algorithm.critic_objective(part), "critic")
                norms = {"critic/loss": critic.loss, "critic/grad_norm": critic.grad_norm}
                result = replace(result, metrics=result.metrics | critic.metrics | norms)
        except NonFiniteLossError as error:
            raise NonFiniteLossError(str(error), [rows[row] for row in error.rows]) from error
        if self.scored is None:
            return result
        first = self.scored
        return replace(result, logprobs=first.logprobs, routes=first.routes, draws=first.draws)

    def update(self, trainer: TrainerGroup, step: int) -> dict[str, float]:
        """Apply the last gradients, in a step in which the policy does not learn the critic's alone; the learning rates
        used."""
        rates = {}
        if self.algorithm.learns(step):
            rates["train/lr"] = trainer.update()
        if self._has_critic:
            rates["critic/lr"] = trainer.update("critic")
        return rates

    def learn(
        self, trainer: TrainerGroup, first: PassResult, step: int
    ) -> tuple[dict[str, float], NonFiniteLossError | None]:
        """All updates, the gradients of the first being there. Returns `train/...` and `critic/...`, as means over the
        updates; and what ended them before the last, of which nothing was applied.
        """
        passes, rates = [first], self.update(trainer, step)
        for number in range(1, len(self.parts)):
            try:
                passes.append(self.gradients(trainer, number))
            except NonFiniteLossError as error:
                return self._metrics(passes) | rates, error
            rates = self.update(trainer, step)
        survival = trainer.update_survival()
        return self._metrics(passes) | rates | ({} if survival is None else {"train/update_survival": survival}), None

    def _metrics(self, passes: Sequence[PassResult]) -> dict[str, float]:
        metrics = train_metrics(mean_of(passes), self.batch)
        if self._has_critic:
            used = used_tokens(self.batch)
            values, returns = (self.batch.fields[name][used].double() for name in ("values", "returns"))
            metrics["critic/explained_variance"] = explained_variance(values, returns)
        return metrics

    @property
    def _has_critic(self) -> bool:
        return self.algorithm.needs.critic


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - variance(returns - values) / variance(returns): 1 for a critic that foresees everything, 0 for one that knows
    the mean alone; 0 where all returns are equal. float64 [N] each."""
    spread = returns.var(correction=0)
    return 0.0 if spread == 0 else float(1.0 - (returns - values).var(correction=0) / spread)


def mean_of(passes: Sequence[PassResult]) -> PassResult:
    """The first with loss, norm and metrics as means over all."""
    return replace(
        passes[0],
        loss=fmean(done.loss for done in passes),
        grad_norm=fmean(done.grad_norm for done in passes),
        metrics={name: fmean(done.metrics[name] for done in passes) for name in passes[0].metrics},
    )


def _alone(batch: TokenBatch) -> TokenBatch:
    """The batch for a model that did not sample it: where its own routers send the tokens, among all tokens, and
    nothing drawn again."""
    return replace(batch, routes=None, replay=False, seeds=None, truncation=EVERY_TOKEN, supports=None)


def _check_finite(name: str, scores: Tensor, used: Tensor) -> None:
    bad = (used & ~scores.isfinite()).any(dim=1).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteLossError(f"{name}: found values that are not finite in rows {bad}, expected numbers", bad)
