"""Where a step's batch comes from: answers that the engines sample and rewards judge, or the answers of the data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from numerics.sampling import answer_seed
from rl.experiment import Experiment
from rl.mismatch import token_versions
from rl.mismatch.drift import tokens_by_age
from rl.run.ahead import Answered
from rl.run.batching import SftExample, batch_from_examples, batch_from_trajectories
from rl.run.clock import StepClock
from rl.run.problems import of_step
from rl.run.stack import Asked, Stack, done
from rollout.tasks import Problem, load_problems, prompt_ids, verify
from rollout.types import Group, Prompt, Trajectory
from trainer.batch import TokenBatch


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


@dataclass(frozen=True)
class Batch:
    """Trajectories as the trainer takes them. versions: int64 [B, S], the weights that sampled each token."""

    tokens: TokenBatch
    versions: Tensor


class Feed(Protocol):
    """Gives the batch of each step. The same step, seed and weights give the same batch, also after a resume."""

    def take(self, step: int, version: int, clock: StepClock) -> Work:
        """The work of `step`, counted from 1, for a trainer at weight `version`; phases are timed by `clock`."""

    def ahead(self, clock: StepClock) -> Batch | None:
        """Some finished answers to later steps, for the trainer to score before it updates; None where there are none.

        Where updates do not land in flight, every answer that was admitted is there when this returns.
        """

    def answered(self) -> list[Answered]:
        """The groups of later steps that a checkpoint must keep."""

    def restore(self, groups: Sequence[Answered]) -> None:
        """Take up what a checkpoint has kept, instead of asking for it again."""

    def renew(self) -> None:
        """Ask again for what is there already: the engines compute in other numerics now."""


def open_feed(experiment: Experiment, stack: Stack) -> Feed:
    """The feed of an experiment's algorithm."""
    return SampledFeed(experiment, stack) if experiment.algorithm.samples else ExampleFeed(experiment, stack.tokenizer)


class SampledFeed:
    """Groups of answers to the problems of each step, admitted up to `rollout.staleness` steps before it."""

    def __init__(self, experiment: Experiment, stack: Stack) -> None:
        self._experiment, self._stack = experiment, stack
        self._problems = load_problems(experiment.data.train, "data.train")
        self._admitted: dict[int, list[Asked]] = {}  # by step, in the order of its prompts
        self._restored: dict[tuple[int, int], Answered] = {}

    def take(self, step: int, version: int, clock: StepClock) -> Work:
        for later in range(step, step + self._experiment.rollout.staleness + 1):
            self._admit(later)
        asked = self._admitted.pop(step)
        with clock.phase("rollout"):
            groups = self._stack.collect(asked)
        trajectories = [replace(answer, group=index) for index, group in enumerate(groups) for answer in group]
        with clock.phase("reward"):
            prompts = [item.group.prompt for item in asked]
            answers = judge(self._experiment, self._stack.tokenizer, prompts, trajectories)
        rewards = torch.tensor([answer.reward for answer in answers])
        members = torch.tensor([trajectory.group for trajectory in trajectories])
        advantages = self._experiment.algorithm.advantages(rewards, members)
        batch = self._batch(trajectories, advantages)
        metrics = rollout_metrics(trajectories, rewards, members, version)
        metrics["perf/sampling_seconds"] = max(a.ended or time.monotonic() for a in asked) - min(a.began for a in asked)
        return Work(batch.tokens, batch.versions, tuple(answers), metrics)

    def ahead(self, clock: StepClock) -> Batch | None:
        asked = [item for step in sorted(self._admitted) for item in self._admitted[step]]
        if not asked:
            return None
        with clock.phase("rollout"):
            if self._experiment.rollout.updates_in_flight:
                self._stack.wait_for_fresh(asked)
            else:
                self._stack.collect(asked)
        groups = [item.answers.result() for item in asked if item.answered]
        count = self._experiment.guard.fresh_answers
        # Those whose last token is youngest, since in flight only these may have any of the trainer's weights.
        answers = sorted(
            (answer for group in groups for answer in group),
            key=lambda answer: -max(answer.weight_versions, default=-1),
        )[:count]
        return self._batch(answers, torch.zeros(len(answers)))

    def answered(self) -> list[Answered]:
        return [
            Answered.of(step, number, item.answers.result())
            for step, asked in sorted(self._admitted.items())
            for number, item in enumerate(asked)
            if item.answered and step <= self._experiment.run.steps
        ]

    def restore(self, groups: Sequence[Answered]) -> None:
        self._restored = {(group.step, group.number): group for group in groups}

    def renew(self) -> None:
        for asked in self._admitted.values():
            asked[:] = [self._stack.admit([item.group], item.temperature)[0] for item in asked]

    def _admit(self, step: int) -> None:
        """Have the groups of a step answered, unless they are. After the last step, some for `ahead` alone."""
        if step in self._admitted:
            return
        groups = self._groups(step)
        if step > self._experiment.run.steps:
            size = self._experiment.rollout.group_size
            groups = groups[: -(-self._experiment.guard.fresh_answers // size)]
        self._admitted[step] = [self._asked(step, number, group) for number, group in enumerate(groups)]

    def _asked(self, step: int, number: int, group: Group) -> Asked:
        temperature, before = self._experiment.rollout.temperature, self._restored.pop((step, number), None)
        if before is not None and before.answers(group):
            return Asked(group, temperature, done(before.trajectories()))
        return self._stack.admit([group], temperature)[0]

    def _groups(self, step: int) -> list[Group]:
        rollout, seed = self._experiment.rollout, self._experiment.run.seed
        count = self._experiment.algorithm.problems_per_step(rollout)
        prompts = to_prompts(self._stack.tokenizer, of_step(self._problems, step, count, seed))
        return to_groups(prompts, rollout.group_size, run_seed=seed, step=step)

    def _batch(self, trajectories: Sequence[Trajectory], advantages: Tensor) -> Batch:
        temperature, redraws = self._experiment.rollout.temperature, self._experiment.redraws
        batch = batch_from_trajectories(trajectories, advantages, temperature, redraws=redraws)
        return Batch(batch, token_versions(trajectories, batch.loss_mask))


class ExampleFeed:
    """Questions with the answers of the data."""

    def __init__(self, experiment: Experiment, tokenizer: PreTrainedTokenizerBase) -> None:
        self._experiment = experiment
        problems = load_problems(experiment.data.train, "data.train")
        self._examples = [
            SftExample(prompt.token_ids, _answer_ids(tokenizer, prompt.problem))
            for prompt in to_prompts(tokenizer, problems)
        ]

    def take(self, step: int, version: int, clock: StepClock) -> Work:
        count = self._experiment.algorithm.problems_per_step(self._experiment.rollout)
        return Work(batch_from_examples(of_step(self._examples, step, count, self._experiment.run.seed)))

    def ahead(self, clock: StepClock) -> Batch | None:
        return None

    def answered(self) -> list[Answered]:
        return []

    def restore(self, groups: Sequence[Answered]) -> None: ...

    def renew(self) -> None: ...


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
    versions = torch.tensor([v for t in trajectories for v in t.weight_versions] or [version])
    return {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std(correction=0).item(),
        "rollout/equal_reward_groups": sum(bool((g == g[0]).all()) for g in by_group) / len(by_group),
        "rollout/finished_fraction": sum(t.finished for t in trajectories) / len(trajectories),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/trajectories": float(len(trajectories)),
        "rollout/staleness_max": float(version - int(versions.min())),
        **{f"rollout/tokens_age_{age}": float(count) for age, count in tokens_by_age(versions, version).items()},
    }


def _answer_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """The tokens of a reference answer, with the EOS that ends it."""
    ids: list[int] = tokenizer(problem.answer, add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id]
