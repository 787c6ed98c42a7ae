"""What a policy with adapters was before it learned: its weights, which stay as they are."""

from __future__ import annotations

from torch import Tensor

from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.result import Scored
from fp8rl.trainer.trainer import Trainer


class Base:
    """Scores batches with the weights of a policy, without its adapters: a reference without memory of its own."""

    def __init__(self, policy: Trainer) -> None:
        self._policy = policy

    def score(self, batch: TokenBatch) -> tuple[list[int], Tensor]:
        """Score the rows of this rank, as :meth:`trainer.scorer.Scorer.score` does."""
        with self._policy.without_adapter():
            return self._policy.score(batch)

    def score_routed(self, batch: TokenBatch) -> tuple[list[int], Scored]:
        """Score them, as :meth:`trainer.scorer.Scorer.score_routed` does."""
        with self._policy.without_adapter():
            return self._policy.score_routed(batch)
