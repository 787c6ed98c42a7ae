"""The canary checks, after a sync, that an engine computes with the weights that it was sent.

Digests cover parameters only. They are right even if an engine computes with operands made from former parameters, or
with a captured CUDA graph that reads freed memory. So each engine answers a few tokens behind a fixed prompt, by
prefill and by decoding like any other answer, and its log-probabilities are compared with the trainer's. The noise
alone chooses the tokens (`numerics.sampling.canary_seed`). Both sides know them beforehand, so that neither waits for
the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.models import read_model
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.sampling import canary_seed
from fp8rl.rl.experiment import Experiment
from fp8rl.rollout.types import Group, Problem, Prompt, SamplingParams, Trajectory
from fp8rl.trainer.step.batch import TokenBatch

PROMPT, ANSWER = 16, 8
"""Tokens that are prefilled, and tokens that are decoded."""


@dataclass(frozen=True)
class Canary:
    """A row of tokens that both sides score at temperature 1."""

    prompt_ids: list[int]
    answer_ids: list[int]
    seed: int
    """The seed by which an engine draws the answer."""
    exact: bool
    """Both sides compute the same, so that any difference is a fault."""

    @classmethod
    def of(cls, run_seed: int, vocabulary: int, longest: int, exact: bool) -> Canary:
        """Draw the canary of a run. longest: tokens that an engine takes in one row."""
        seed, count = canary_seed(run_seed), max(2, min(PROMPT + ANSWER, longest))
        positions = torch.arange(-1, count - 1)  # of the token before each
        seeds = torch.full((count,), seed)
        tokens = ops.draw(torch.zeros(count, vocabulary), torch.ones(count), seeds, positions).tolist()
        prompt = max(1, count - ANSWER)
        return cls(tokens[:prompt], tokens[prompt:], seed, exact)

    @property
    def group(self) -> Group:
        """Return what an engine is asked for."""
        return Group(Prompt(Problem("", ""), self.prompt_ids), (self.seed,))

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(len(self.answer_ids), 1.0)

    @property
    def batch(self) -> TokenBatch:
        """Return what the trainer scores."""
        return TokenBatch.of([self.prompt_ids], [self.answer_ids])

    def difference(self, answer: Trajectory, scored: Tensor) -> float:
        """Return the largest abs(d) of the answer's tokens, in nats; infinite for other tokens, or if d is not finite.

        scored: fp32 [1, S], the trainer's log-probabilities of the batch.
        """
        if answer.token_ids != self.answer_ids:
            return torch.inf
        d = scored[0, len(self.prompt_ids) :].double() - torch.tensor(answer.logprobs, dtype=torch.float32).double()
        return float(d.abs().nan_to_num(torch.inf).max())

    def fault(self, difference: float, version: int) -> str:
        """Return why an engine with weights of this version is rejected for its canary; empty if it passes."""
        if difference == 0 or not self.exact:
            return ""
        return (
            f"its canary differs by {difference:.3g} nats from the trainer's at weight version {version}, expected"
            " 0: the engine holds the trainer's weights, but computes with other bytes.\nIf the canary of every engine "
            "differs, run fp8rl doctor SPEC: it says where. sync.canary=false runs without a canary"
        )


def canary_of(experiment: Experiment, numerics: NumericsConfig) -> Canary | None:
    """Choose the canary that engines in these numerics answer after each sync of a run; None: no canary."""
    if not (experiment.sync.canary and experiment.needs_engines):
        return None
    vocabulary = read_model(experiment.model.directory).sizes.vocab_size
    equal = numerics.mode == "exact" and numerics.trainer_spec == numerics.rollout_spec
    return Canary.of(experiment.run.seed, vocabulary, experiment.rollout.context_length, equal)
