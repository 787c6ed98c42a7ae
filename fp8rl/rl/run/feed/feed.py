"""The source of a step's batch: answers that the engines sample and rewards judge, or the answers of the data."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8rl.numerics.sampling import answer_seed
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.record.metrics_log import StepClock
from fp8rl.rl.run.batching import (
    RolloutBatch,
    batch_from_trajectories,
    conversation_metrics,
    dropped_metrics,
    reward_metrics,
    rollout_metrics,
    teacher_logprobs,
    token_versions,
)
from fp8rl.rl.run.events import FilterError
from fp8rl.rl.run.feed.judging import JudgedAnswer
from fp8rl.rl.run.feed.problems import to_prompts, training_problems
from fp8rl.rl.run.feed.sampling import PendingGroup, Sampling, done
from fp8rl.rl.run.feed.state import FeedState, SavedGroup
from fp8rl.rollout.tasks.chat import answer_ids
from fp8rl.rollout.types import Group, Prompt, Trajectory
from fp8rl.trainer.step.batch import TokenBatch

FRESH_ANSWERS = 24
"""How many finished answers of later steps the trainer scores before each update, if sampling runs ahead. Older weights
have sampled the step's own batch, so the batch cannot show whether both sides agree."""
Meanwhile = Callable[[], object]
"""Work to do while engines sample."""


class Feed:
    """Gives the batch of each step. The same step, seed and weights give the same batch, also after a resume.

    The batch has groups of answers, admitted in the order of the run's problems and up to `rollout.staleness` steps
    ahead. A step trains on the oldest groups; with `rollout.oversample`, on the oldest groups that are judged. Further
    groups replace groups that the algorithm does not keep.
    """

    def __init__(self, experiment: Experiment, sampling: Sampling) -> None:
        self._experiment, self._sampling = experiment, sampling
        self._problems = training_problems(experiment)
        self._size = experiment.algorithm.problems_per_step(experiment.rollout)
        self._next = 0
        self._group = functools.lru_cache(2 * self._size)(self._make_group)
        self._admitted: list[PendingGroup] = []
        self._probes: list[PendingGroup] = []
        """Groups beyond the last step, which the trainer scores, but does not train on."""

    def take(self, step: int, version: int, clock: StepClock, meanwhile: Meanwhile = lambda: None) -> RolloutBatch:
        """Return the batch of `step`, counted from 1, for a trainer at weight `version`; phases are timed by `clock`.

        meanwhile: called once the engines have been asked for all that they may sample now.
        """
        self._fill(step)
        with clock.phase("rollout"):
            meanwhile()
            for number in range(self._next, self._next + self._size):  # most likely the next step's
                self._group(number)
        kept: list[list[JudgedAnswer]] = []
        dropped: list[list[JudgedAnswer]] = []
        began, ended = math.inf, 0.0
        while len(kept) < self._size:
            missing = self._size - len(kept)
            if not self._admitted:
                self._admit_in_place_of(dropped, missing)
            with clock.phase("rollout"):
                answered = self._answered(missing)
            began, ended = min(began, *(item.began for item in answered)), time.monotonic()
            with clock.phase("reward"):
                for item in answered:
                    group = [answer for answer in item.judged() if not answer.trajectory.failed]
                    rewards = torch.tensor([answer.reward for answer in group])
                    (kept if group and self._experiment.algorithm.keeps_group(rewards) else dropped).append(group)
        self._sampling.tell_failures()
        rollouts = self._rollouts(kept, version)
        rollouts.metrics.update(dropped_metrics(dropped))
        if self._experiment.rollout.staleness:
            ahead = sum(item.answered for item in self._admitted)
            rollouts.metrics["perf/groups_ahead"] = float(ahead)
            rollouts.metrics["perf/groups_in_flight"] = float(len(self._admitted) - ahead)
        rollouts.metrics["perf/sampling_seconds"] = max(0.0, ended - began)
        return rollouts

    def ahead(self, clock: StepClock) -> RolloutBatch | None:
        """Return some finished answers to later steps, for the trainer to score before it updates; None without any."""
        asked, missing = [*self._admitted, *self._probes], FRESH_ANSWERS
        if not asked:
            return None
        with clock.phase("rollout"):
            if self._experiment.rollout.updates_in_flight:
                self._sampling.wait_for_fresh(asked)
            else:  # wait until the oldest groups give enough answers of the trainer's weights; others go on meanwhile
                version, oldest = self._sampling.syncing.version, iter(asked)
                while missing > 0 and (item := next(oldest, None)) is not None:
                    (found,) = self._sampling.collect([item])
                    missing -= sum(version in answer.weight_versions for answer in found if not answer.failed)
        groups = [item.answers.result() for item in asked if item.answered]
        # The answers with the newest tokens: with updates in flight, only these may have any of the trainer's weights.
        answers = sorted(
            (answer for group in groups for answer in group if not answer.failed),
            key=lambda answer: -max(answer.weight_versions, default=-1),
        )[:FRESH_ANSWERS]
        return RolloutBatch(*self._batch(answers)) if answers else None

    def drain(self, clock: StepClock) -> None:
        """Wait for every answer that was admitted, unless weights may be updated while answers are sampled."""
        asked = [*self._admitted, *self._probes]
        if asked and not self._experiment.rollout.updates_in_flight:
            with clock.phase("rollout"):
                self._sampling.collect(asked)

    def state(self) -> FeedState:
        """Return the state that a checkpoint must keep for later steps."""
        answered = [
            SavedGroup.of(item.number, item.group, item.answers.result()) for item in self._admitted if item.answered
        ]
        return FeedState(self._next, [item.number for item in self._admitted], answered)

    def restore(self, state: FeedState) -> None:
        """Continue from the state of a checkpoint; groups whose answers it has are not sampled again."""
        before = {group.number: group for group in state.answered}
        self._next = state.next
        self._admitted = [self._admit(number, before.get(number)) for number in state.admitted]

    def renew(self) -> None:
        """Sample all admitted groups again, because the engines compute in other numerics now."""
        self._admitted = [self._admit(item.number) for item in self._admitted]
        self._probes = [self._admit(item.number) for item in self._probes]

    def _fill(self, step: int) -> None:
        """Admit the groups that staleness allows and that the next steps need."""
        rollout, to_come = self._experiment.rollout, self._experiment.run.steps - step + 1
        wanted = math.ceil(min(rollout.staleness + 1, to_come) * self._size * rollout.oversample)
        self._admit_next(wanted - len(self._admitted))
        if rollout.staleness >= to_come:
            first = (step + rollout.staleness - 1) * self._size
            count = -(-FRESH_ANSWERS // rollout.group_size)
            self._probes = [self._admit(number) for number in range(first, first + min(count, self._size))]

    def _admit_in_place_of(self, dropped: list[list[JudgedAnswer]], count: int) -> None:
        """Admit further groups in place of dropped ones. Raises FilterError: too many were dropped."""
        patience = self._experiment.rollout.filter_patience
        if len(dropped) >= patience * self._size:
            rewards = [answer.reward for group in dropped for answer in group]
            self._sampling.tell_failures()
            if not rewards:
                raise FilterError(
                    f"found {len(dropped)} groups in which the environment ({self._experiment.environment.label}) "
                    f"failed in every answer, expected {self._size} groups to train on. Correct the error shown above"
                )
            raise FilterError(
                f"found {len(dropped)} groups that the {self._experiment.algorithm.name} algorithm does not train on "
                f"(mean reward {sum(rewards) / len(rewards):.3g}), expected {self._size} that it trains on before "
                f"{patience * self._size} are dropped (rollout.filter_patience={patience}). If all problems are "
                "solved, or none is, train on other problems"
            )
        self._admit_next(count)

    def _admit_next(self, count: int) -> None:
        for _ in range(count):
            self._admitted.append(self._admit(self._next))
            self._next += 1

    def _make_group(self, number: int) -> Group:
        rollout, seed = self._experiment.rollout, self._experiment.run.seed
        step, place = number // self._size + 1, number % self._size
        prompts = to_prompts(self._sampling.tokenizer, [self._problems.nth(number)])
        return to_groups(prompts, rollout.group_size, run_seed=seed, step=step, first=place)[0]

    def _admit(self, number: int, before: SavedGroup | None = None) -> PendingGroup:
        """Admit group `number`. before: its saved answers, which are used if they fit the group."""
        group = self._group(number)
        drawn, judge = self._sampling.at(self._experiment.rollout.temperature), self._sampling.judge
        if before is not None and before.answers(group):
            return PendingGroup(group, drawn, done(before.trajectories()), number, judge)
        (asked,) = self._sampling.admit([group], drawn, judge, first=number)
        return asked

    def _answered(self, count: int) -> list[PendingGroup]:
        """Return the `count` oldest groups; if more were admitted than a step needs, the oldest that are judged."""
        if self._experiment.rollout.oversample > 1.0:
            self._sampling.wait_for_some(self._admitted, count)
            chosen = [item for item in self._admitted if item.awaited is None][:count]
        else:
            chosen = self._admitted[:count]
        self._sampling.collect(chosen)
        taken = {item.number for item in chosen}
        self._admitted = [item for item in self._admitted if item.number not in taken]
        return chosen

    def _rollouts(self, groups: list[list[JudgedAnswer]], version: int) -> RolloutBatch:
        answers = [answer for group in groups for answer in group]
        trajectories = [answer.trajectory for answer in answers]
        rewards = torch.tensor([answer.reward for answer in answers])
        members = torch.tensor([index for index, group in enumerate(groups) for _ in group])
        outcomes = Outcomes(rewards, members, torch.tensor([trajectory.finished for trajectory in trajectories]))
        tokens, versions = self._batch(trajectories)
        if self._experiment.algorithm.needs.teacher:
            tokens = tokens.with_fields(teacher_logprobs=teacher_logprobs(answers, tokens))
        metrics = rollout_metrics(trajectories, rewards, members, version) | reward_metrics(answers)
        if self._sampling.conversations is not None:
            metrics |= conversation_metrics(trajectories)
        return RolloutBatch(tokens, versions, outcomes, tuple(answers), metrics)

    def _batch(self, trajectories: Sequence[Trajectory]) -> tuple[TokenBatch, Tensor]:
        """Return the batch, and the weight version of each of its tokens."""
        temperature, redraws = self._experiment.rollout.temperature, self._experiment.redraws
        truncation = self._experiment.rollout.truncation
        batch = batch_from_trajectories(trajectories, temperature, redraws=redraws, truncation=truncation)
        return batch, token_versions(trajectories, batch.loss_mask)


class ExampleFeed(Feed):
    """A feed for supervised training: questions with the answers of the data. It admits no group."""

    def take(self, step: int, version: int, clock: StepClock, meanwhile: Meanwhile = lambda: None) -> RolloutBatch:
        meanwhile()
        tokenizer = self._sampling.tokenizer
        prompts = to_prompts(tokenizer, self._problems.of_step(step, self._size))
        asked = (prompt.problem for prompt in prompts)
        answers = [answer_ids(tokenizer, each.conversation, each.answer, each.chat_template) for each in asked]
        return RolloutBatch(TokenBatch.of([prompt.token_ids for prompt in prompts], answers))


def to_groups(prompts: Sequence[Prompt], size: int, *, run_seed: int, step: int, first: int = 0) -> list[Group]:
    """Return a group of `size` answers for each prompt of `step`, in order, with the seeds that the step gives them.
    first: the number of the first prompt in the step."""
    return [
        Group(prompt, tuple(answer_seed(run_seed, step, place, answer) for answer in range(size)))
        for place, prompt in enumerate(prompts, first)
    ]
