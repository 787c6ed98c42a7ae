"""Where a step's batch comes from: answers that the engines sample and rewards judge, or the answers of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from numerics.sampling import answer_seed
from rl.experiment import Experiment
from rl.mismatch import token_versions
from rl.run.batching import SftExample, batch_from_examples, batch_from_trajectories
from rl.run.clock import StepClock
from rl.run.problems import of_step
from rollout.tasks import Problem, load_problems, prompt_ids, verify
from rollout.types import Group, Prompt, Trajectory
from trainer.batch import TokenBatch

Sample = Callable[[Sequence[Group], float], list[Trajectory]]
"""The answers of groups, at a temperature (0 is greedy)."""


@dataclass(frozen=True)
class Answer:
    """A sampled answer: its trajectory, its text without the stop token, and its reward."""

    problem: Problem
    trajectory: Trajectory
    text: str
    reward: float


@dataclass(frozen=True)
class Work:
    """What one step trains on.

    Attributes:
        versions: int64 [B, S], the weight version that sampled each token; None where nothing was sampled.
        answers: by row of the batch; empty where nothing was sampled.
        metrics: `rollout/...`.
    """

    batch: TokenBatch
    versions: Tensor | None = None
    answers: tuple[Answer, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)


class Feed(Protocol):
    """Gives the batch of each step. The same step, seed and weights give the same batch, also after a resume."""

    def take(self, step: int, version: int, clock: StepClock) -> Work:
        """The work of `step`, counted from 1, for a trainer at weight `version`; phases are timed by `clock`."""


def open_feed(experiment: Experiment, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Feed:
    """The feed of an experiment's algorithm."""
    return (SampledFeed if experiment.algorithm.samples else ExampleFeed)(experiment, tokenizer, sample)


class SampledFeed:
    """Groups of answers to the problems of a step, sampled when the step asks for them."""

    def __init__(self, experiment: Experiment, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> None:
        self._experiment, self._tokenizer, self._sample = experiment, tokenizer, sample
        self._problems = load_problems(experiment.data.train, "data.train")

    def take(self, step: int, version: int, clock: StepClock) -> Work:
        rollout, algorithm = self._experiment.rollout, self._experiment.algorithm
        seed, count = self._experiment.run.seed, algorithm.problems_per_step(rollout)
        prompts = to_prompts(self._tokenizer, of_step(self._problems, step, count, seed))
        groups = to_groups(prompts, rollout.group_size, run_seed=seed, step=step)
        with clock.phase("rollout"):
            trajectories = self._sample(groups, rollout.temperature)
        with clock.phase("reward"):
            answers = judge(self._experiment, self._tokenizer, prompts, trajectories)
        rewards = torch.tensor([answer.reward for answer in answers])
        members = torch.tensor([trajectory.group for trajectory in trajectories])
        batch = batch_from_trajectories(
            trajectories,
            algorithm.advantages(rewards, members),
            rollout.temperature,
            redraws=self._experiment.redraws,
        )
        metrics = rollout_metrics(trajectories, rewards, members, version)
        return Work(batch, token_versions(trajectories, batch.loss_mask), tuple(answers), metrics)


class ExampleFeed:
    """Questions with the answers of the data."""

    def __init__(self, experiment: Experiment, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> None:
        self._experiment = experiment
        problems = load_problems(experiment.data.train, "data.train")
        self._examples = [
            SftExample(prompt.token_ids, _answer_ids(tokenizer, prompt.problem))
            for prompt in to_prompts(tokenizer, problems)
        ]

    def take(self, step: int, version: int, clock: StepClock) -> Work:
        count = self._experiment.algorithm.problems_per_step(self._experiment.rollout)
        return Work(batch_from_examples(of_step(self._examples, step, count, self._experiment.run.seed)))


def to_prompts(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[Prompt]:
    """Each problem with the tokens of its question, in the tokenizer's chat template."""
    return [Prompt(problem, prompt_ids(tokenizer, problem.question)) for problem in problems]


def to_groups(prompts: Sequence[Prompt], size: int, *, run_seed: int, step: int) -> list[Group]:
    """`size` answers to each prompt, seeded as those that `step` asks for, whose prompts these are in their order."""
    return [
        Group(prompt, tuple(answer_seed(run_seed, step, number, answer) for answer in range(size)))
        for number, prompt in enumerate(prompts)
    ]


def judge(
    experiment: Experiment,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    trajectories: Sequence[Trajectory],
) -> list[Answer]:
    """The trajectories, which name their prompts by `group`, with their texts and rewards."""
    answers = []
    for trajectory in trajectories:
        problem = prompts[trajectory.group].problem
        text = tokenizer.decode(trajectory.token_ids[:-1] if trajectory.finished else trajectory.token_ids)
        reward = verify(problem, text, trajectory.finished, experiment.data.reward)
        answers.append(Answer(problem, trajectory, text, reward))
    return answers


def rollout_metrics(
    trajectories: Sequence[Trajectory], rewards: Tensor, groups: Tensor, version: int
) -> dict[str, float]:
    """`rollout/...` of a step. rewards, groups: [N], one per trajectory; version: the trainer's while sampling."""
    lengths = [len(t.token_ids) for t in trajectories]
    by_group = [rewards[groups == group] for group in groups.unique()]
    oldest = min((v for t in trajectories for v in t.weight_versions), default=version)
    return {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std(correction=0).item(),
        "rollout/equal_reward_groups": sum(bool((g == g[0]).all()) for g in by_group) / len(by_group),
        "rollout/finished_fraction": sum(t.finished for t in trajectories) / len(trajectories),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/trajectories": float(len(trajectories)),
        "rollout/staleness_max": float(version - oldest),
    }


def _answer_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """The tokens of a reference answer, with the EOS that ends it."""
    ids: list[int] = tokenizer(problem.answer, add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id]
