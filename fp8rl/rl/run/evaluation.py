"""Evaluation: engines answer held-out problems, and rewards judge the answers. `data.eval` is answered greedily,
further sets by their own sampling parameters.

Where sampling runs ahead of training, an evaluation is begun after the sync of its step, runs together with the next
step's sampling, and is waited for before the next update. So all of its tokens come from one version of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from transformers import PreTrainedTokenizerBase

from fp8rl.numerics.sampling import GREEDY, evaluation_seed
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.guard.guard import Guard
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.run.batching import batch_from_trajectories, token_versions
from fp8rl.rl.run.feed.judging import Judge, JudgedAnswer
from fp8rl.rl.run.feed.problems import to_prompts
from fp8rl.rl.run.feed.sampling import PendingGroup, Sampling
from fp8rl.rl.run.interrupts import BoundedExitStack
from fp8rl.rollout.engine.server.answers import check_versions
from fp8rl.rollout.tasks.chat import end_ids
from fp8rl.rollout.tasks.data import load_problems
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.types import Group, SamplingParams
from fp8rl.trainer.actor import TrainerGroup


@dataclass(frozen=True)
class HeldOut:
    """The requests of one evaluation set."""

    name: str
    """Name of the set; empty for `data.eval`."""
    groups: tuple[Group, ...]
    sampling: SamplingParams
    rewards: RewardsSection
    rewards_key: str = ""
    """The key in the spec of the set's own rewards; empty: it has the run's rewards."""
    pass_at: tuple[int, ...] = ()
    """The values of k for which `pass@k` is reported."""


def held_out(experiment: Experiment, tokenizer: PreTrainedTokenizerBase) -> Iterator[HeldOut]:
    """Every set of the experiment, `data.eval` first; none if evaluation is off.

    A seed follows from the run's seed, the set, the problem and the answer; it is the same at every step.
    """
    count, data, stop = experiment.eval.problems, experiment.data, end_ids(tokenizer)
    if count == 0:
        return
    if data.eval is not None:
        prompts = to_prompts(tokenizer, load_problems(data.source(data.eval, "data.eval"))[:count])
        greedily = experiment.rollout.sampling(0.0, stop)
        yield HeldOut("", tuple(Group(prompt, (GREEDY,)) for prompt in prompts), greedily, experiment.rewards)
    for index, own in enumerate(experiment.eval.sets):
        key, seed = f"eval.sets.{index}", experiment.run.seed
        prompts = to_prompts(tokenizer, load_problems(data.source(own, key))[: own.problems or count])
        seeds = [
            tuple(
                evaluation_seed(seed, own.name, problem, answer) if own.temperature else GREEDY
                for answer in range(own.samples)
            )
            for problem in range(len(prompts))
        ]
        longest = own.max_new_tokens or experiment.rollout.max_new_tokens
        yield HeldOut(
            own.name,
            tuple(map(Group, prompts, seeds)),
            SamplingParams(longest, own.temperature, stop, own.top_p, own.top_k, own.min_p),
            own.rewards or experiment.rewards,
            f"{key}.rewards" if own.rewards else "",
            own.pass_at,
        )


class Evaluation:
    """Evaluates a run's weights; one evaluation at a time."""

    def __init__(self, experiment: Experiment, sampling: Sampling, closing: BoundedExitStack) -> None:
        """closing: ends the judges of sets with rewards of their own."""
        self._experiment, self._sampling = experiment, sampling
        self._sets = list(held_out(experiment, sampling.tokenizer))
        self._judges = [sampling.judge.without_teacher() for _ in self._sets]
        for index, each in enumerate(self._sets):
            if each.rewards_key:
                events = sampling.syncing.events
                self._judges[index] = Judge(each.rewards, sampling.tokenizer, each.rewards_key, events=events)
                closing.callback(self._judges[index].close)
        self._asked: list[list[PendingGroup]] = []
        self._step = self._version = 0

    def is_due(self, step: int) -> bool:
        """Return whether `step` ends with an evaluation. None runs in the background of the last step."""
        every, last = self._experiment.eval.every, self._experiment.run.steps
        due = step == last or bool(every and step % every == 0)
        return bool(self._sets) and due and not (step == last - 1 and self.runs_in_background(step))

    def runs_in_background(self, step: int) -> bool:
        """Return whether the evaluation of `step` runs during the next step, whose row gets its metrics."""
        return bool(self._experiment.rollout.staleness) and 0 < step < self._experiment.run.steps

    @property
    def under_way(self) -> bool:
        """Return whether an evaluation was begun and not finished."""
        return bool(self._asked)

    def begin(self, step: int) -> None:
        """Ask the engines, which hold the weights of `step`, for the answers to all sets."""
        self._step, self._version = step, self._sampling.syncing.version
        for each, judge in zip(self._sets, self._judges, strict=True):
            self._asked.append(self._sampling.admit(each.groups, each.sampling, judge))

    def finish(self) -> tuple[dict[str, float], list[JudgedAnswer]]:
        """Wait for the evaluation; return its `eval/...` metrics, and the answers of the first greedy set.

        Raises StaleWeightsError for a token of other weights than the trainer had when the evaluation was begun.
        """
        metrics: dict[str, float] = {}
        greedy: list[JudgedAnswer] = []
        asked, self._asked = self._asked, []
        found = self._sampling.collect([item for items in asked for item in items])
        check_versions(chain.from_iterable(found), self._version, self._version)
        for each, items in zip(self._sets, asked, strict=True):
            groups = [  # of a conversation, its last row; the number of the problem is the group
                [
                    replace(answer, trajectory=replace(answer.trajectory, group=item.number))
                    for answer in item.judged()
                    if not answer.trajectory.branch
                ]
                for item in items
            ]
            metrics |= set_metrics(each, groups)
            if each.sampling.temperature == 0 and not greedy:
                greedy = [answer for group in groups for answer in group]
        for judge in self._judges:
            judge.failures.tell()
        self._sampling.tell_failures()
        if self._sets and self._experiment.rollout.staleness:
            metrics["eval/at_step"] = float(self._step)
        return metrics, greedy


def set_metrics(each: HeldOut, groups: Sequence[Sequence[JudgedAnswer]]) -> dict[str, float]:
    """Return `eval/...` of a set. groups: the answers to each problem."""
    first = each.rewards.functions[0].label
    values = [
        [sum(value for name, value in answer.parts.items() if name.partition("/")[0] == first) for answer in group]
        for group in groups
    ]
    answers = [answer for group in groups for answer in group]
    mean = sum(map(sum, values)) / len(answers)
    graded = sum(value not in (0.0, 1.0) for group in values for value in group)
    main = {"accuracy": mean, "problems": float(len(groups))} | ({"graded": float(graded)} if graded else {})
    if not each.name:
        return {f"eval/{name}": value for name, value in main.items()}
    metrics = main | {
        "finished_fraction": sum(answer.trajectory.finished for answer in answers) / len(answers),
        "response_tokens_mean": sum(len(answer.trajectory.logprobs) for answer in answers) / len(answers),
    }
    samples = len(values[0])
    if samples > 1:
        metrics[f"avg@{samples}"] = mean
    for k in each.pass_at:
        right = [sum(value >= 1.0 for value in group) for group in values]
        metrics[f"pass@{k}"] = sum(pass_at(k, samples, count) for count in right) / len(right)
    return {f"eval/{each.name}/{name}": value for name, value in metrics.items()}


def pass_at(k: int, samples: int, right: int) -> float:
    """Estimate without bias the chance that one of k answers is right, if `right` of `samples` are (Chen et al. 2021):
    1 - the share of the subsets of k answers in which none is right."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def agreement_on(answers: Sequence[JudgedAnswer], trainer: TrainerGroup, guard: Guard) -> dict[str, float]:
    """Return `mismatch/...` over greedy answers, whose log-probabilities the engine reports at temperature 1."""
    if not answers:
        return {}
    trajectories = [answer.trajectory for answer in answers]
    batch = batch_from_trajectories(trajectories, 1.0, replay=guard.replays)
    scored, versions = trainer.score_routed(batch), token_versions(trajectories, batch.loss_mask)
    return ScoredBatch.of(batch, versions, trainer.weight_version, scored, guard.tis_cap).metrics()
