"""The interface between an algorithm and the loop, and the import of a user's algorithm."""

from __future__ import annotations

import difflib
import inspect
import sys
from dataclasses import dataclass, field
from types import FunctionType
from typing import ClassVar, Self

import torch
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.section import Section, SpecFunction
from fp8rl.rl.algorithms.parts.corrections import Correction
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.tasks.named_functions import named_object
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import Objective, TokenBatch


@dataclass(frozen=True)
class Needs:
    """The scores that an algorithm needs of a batch before its first update, besides the engines' log-probabilities. A
    reference, a critic or a teacher is loaded only where its scores are needed."""

    old_logprobs: bool = False
    """The policy's log-probabilities at the weights before the first update, `fields["old_logprobs"]`."""
    reference: bool = False
    """The log-probabilities of the model that the run started from, `fields["reference_logprobs"]`."""
    critic: bool = False
    """The value that a critic predicts at each token, `fields["values"]`."""
    teacher: bool = False
    """The log-probabilities of a teacher, `fields["teacher_logprobs"]`."""


@dataclass(frozen=True)
class Outcomes:
    """Rewards of the trajectories of a batch, by row."""

    rewards: Tensor
    """float [N]."""
    groups: Tensor
    """int64 [N], equal numbers for trajectories of one prompt, in any order."""
    finished: Tensor
    """bool [N], False if the length limit ended the answer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that an algorithm's `token_advantages` has returned."""


class AlgorithmConfig(Section):
    """The `algorithm:` section of an experiment: its settings, and how they turn a batch into a loss.

    A subclass of ours is in a file of `fp8rl/rl/algorithms`, with `name: Literal["..."]`. A spec names a user's class
    by `path/to/file.py:Class`. A subclass overrides `objective`, and `advantages` if it samples.
    """

    name: SpecFunction
    """The name of an algorithm of ours, or a class of yours: `package.module:Class` or `path/to/file.py:Class`."""
    samples: ClassVar[bool] = True
    """True if the algorithm learns from sampled answers, false if it learns from the answers of the data."""

    formula: ClassVar[str] = ""
    """The loss in one line, the same for all settings. r = e^(logprob - old), and R is the reward."""

    compares_in_group: ClassVar[bool] = False
    """True if a reward is compared with the mean reward of the prompt's answers, which is 0 in a group of one."""

    @property
    def loss_summary(self) -> str:
        """The loss of a token with these settings, in one line."""
        return self.formula or f"as {self.name} says"

    def resolved(self, rollout: RolloutSection) -> Self:
        """Return the algorithm with the defaults that depend on the rollout section."""
        return self

    @property
    def likeliest(self) -> int:
        """How many of its likeliest tokens the engine reports for each token that it samples."""
        return 0

    @property
    def updates(self) -> int:
        """Optimizer steps that a batch gets."""
        return 1

    def mini_batches(self, groups: Tensor) -> list[list[int]]:
        """The rows of each update, in the updates' order. groups: as in `Outcomes`."""
        return [list(range(len(groups)))]

    @property
    def needs(self) -> Needs:
        """The scores that a batch needs before its first update."""
        return Needs()

    def critic_config(self, trainer: TrainerSection) -> TrainerSection | None:
        """The trainer section of the critic; None without a critic."""
        return None

    def learns(self, step: int) -> bool:
        """Return whether the policy is updated in this step of the run, counted from 1."""
        return True

    def problems_per_step(self, rollout: RolloutSection) -> int:
        """How many problems of the data a step takes."""
        return rollout.prompts_per_step

    def advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        """The advantage of each token, float32 [B, S], 0 where the loss has no target."""
        raise UnwrittenMethodError(self, "advantages")

    def training_fields(self, outcomes: Outcomes, batch: TokenBatch) -> dict[str, Tensor]:
        """The batch's fields that the objective reads in addition to the scores, each float32 [B, S]."""
        return {"advantages": self.advantages(outcomes, batch)}

    def keeps_group(self, rewards: Tensor) -> bool:
        """Return whether to train on a group with these rewards, float [G]. If not, another group is sampled."""
        return True

    def objective(self, batch: TokenBatch) -> Objective:
        """The loss of a step on `batch`, with the denominators of the whole batch."""
        raise UnwrittenMethodError(self, "objective")

    def critic_objective(self, batch: TokenBatch) -> Objective:
        """The critic's loss of a step on `batch`, with the denominators of the whole batch."""
        raise UnwrittenMethodError(self, "critic_objective")

    def notes(self) -> list[str]:
        """Differences from other frameworks that a user should know, one sentence each."""
        return []

    @property
    def correction(self) -> Correction:
        """Importance weights and rejections for tokens on which trainer and engine disagree; by default none."""
        return Correction()


class UnwrittenMethodError(NotImplementedError):
    """A method that an algorithm must have is not written, or is written under another name."""

    def __init__(self, algorithm: AlgorithmConfig, method: str) -> None:
        own = [each for each in type(algorithm).__mro__ if not each.__module__.startswith(("fp8rl.", "pydantic."))]
        names = [name for each in own for name, value in vars(each).items() if isinstance(value, FunctionType)]
        near = difflib.get_close_matches(method, names, n=1)
        self.found = f"{algorithm.name} with def {near[0]}" if near else algorithm.name
        self.expected = f"def {method}{inspect.signature(getattr(type(algorithm), method))}".replace("'", "")
        super().__init__(f"found {self.found}, expected {self.expected}")


def used_tokens(batch: TokenBatch) -> Tensor:
    """bool [B, S]: the targets of the loss whose rollout logprob is finite."""
    rollout = batch.fields.get("rollout_logprobs")
    return batch.loss_mask if rollout is None else batch.loss_mask & torch.isfinite(rollout)


# Imports and checks a user's algorithm, which a spec names.

KEY = "algorithm.name"


def users_algorithm(name: str) -> type[AlgorithmConfig]:
    """Import the class that `path/to/file.py:Class` or `package.module:Class` names.

    The class's module is pickled with each objective, so that the trainer's ranks do not need the user's file.
    Raises UserError: there is no such class, its module cannot be imported, or the class is no algorithm.
    """
    from ray import cloudpickle  # its import takes a second

    found = named_object(name, KEY, {})
    if not (isinstance(found, type) and issubclass(found, AlgorithmConfig)):
        expected = "a subclass of fp8rl.PolicyGradient, or of fp8rl.AlgorithmConfig"
        remedy = "Correct the name after the colon, or derive the class from one of these."
        raise user_error(KEY, name, expected, remedy)
    cloudpickle.register_pickle_by_value(sys.modules[found.__module__])
    return found
