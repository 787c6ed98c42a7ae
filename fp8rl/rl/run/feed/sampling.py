"""Has engines sample groups of answers, waits for the groups, and has them judged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.events import STALE_RESYNCS
from fp8rl.rl.run.feed.conversations import Conversations
from fp8rl.rl.run.feed.judging import Judge, JudgedAnswer
from fp8rl.rl.run.syncing import Syncing
from fp8rl.rollout.tasks.chat import end_ids
from fp8rl.rollout.types import Group, SamplingParams, StaleWeightsError, Trajectory

_LOOK_SECONDS = 0.1
"""Interval of the check whether a new engine waits for weights."""


class PendingGroup:
    """A group that engines were asked for at the monotonic time `began` (infinite if its answers were there already),
    and its answers and verdicts as they come.

    The future `answers` has the order of the group's seeds. `number`: of the prompt in the run or in its set, from 0.
    """

    verdicts: Future[list[JudgedAnswer]]
    """The verdicts on the answers, if there is a judge."""

    def __init__(
        self,
        group: Group,
        sampling: SamplingParams,
        answers: Future[list[Trajectory]],
        number: int,
        judge: Judge | None,
    ) -> None:
        """judge: judges the answers as soon as they are there; None: they are not judged."""
        self.group, self.sampling, self.number = group, sampling, number
        self.began, self.asked_again = math.inf if answers.done() else time.monotonic(), False
        self._judge = judge
        self.expect(answers)

    def expect(self, answers: Future[list[Trajectory]]) -> None:
        """Wait for these answers in place of former ones, which cannot be used."""
        self.answers = answers
        if self._judge is not None:
            self.verdicts = self._judge.begin(self.group.prompt, answers)

    @property
    def answered(self) -> bool:
        """Return whether all answers are there without an error."""
        return self.answers.done() and not self.answers.cancelled() and self.answers.exception() is None

    @property
    def awaited(self) -> Future[Any] | None:
        """The next future of the group: the answers, then the verdicts on them; None if all are there."""
        if not self.answered:
            return self.answers
        return None if self.verdicts.done() else self.verdicts

    def judged(self) -> list[JudgedAnswer]:
        """Wait for the verdict on each answer. The answers must be there."""
        assert self._judge is not None
        return self._judge.wait(self.verdicts)


class Sampling:
    """Has engines sample groups. During a wait it also sends the trainer's weights to new engines."""

    def __init__(
        self,
        experiment: Experiment,
        tokenizer: PreTrainedTokenizerBase,
        judge: Judge,
        syncing: Syncing,
        conversations: Conversations | None = None,
    ) -> None:
        """judge: gives rewards. conversations: the environment's; None: an answer is one turn of the model."""
        self.experiment, self.tokenizer, self.judge = experiment, tokenizer, judge
        self.syncing, self.conversations = syncing, conversations
        self._turn, self._events = syncing.turns.turn, syncing.events
        self._ends = end_ids(tokenizer)

    def tell_failures(self) -> None:
        """Tell how often rewards and environment have failed since the last call."""
        self.judge.failures.tell()
        if self.conversations is not None:
            self.conversations.failures.tell()

    def at(self, temperature: float) -> SamplingParams:
        """Return the experiment's sampling parameters at a temperature; 0 is greedy."""
        drawn, experiment = self.experiment.rollout.sampling(temperature, self._ends), self.experiment
        if temperature == 0:
            return drawn
        return replace(drawn, supports=experiment.carries_supports, likeliest=experiment.algorithm.likeliest)

    def admit(
        self, groups: Sequence[Group], sampling: SamplingParams, judge: Judge | None = None, first: int = 0
    ) -> list[PendingGroup]:
        """Ask engines for groups, at the trainer's present weights or the weights of later syncs.

        judge: judges each group as soon as it is answered. first: number of the first group.
        """
        return [
            PendingGroup(group, sampling, self._answers(group, sampling), number, judge)
            for number, group in enumerate(groups, first)
        ]

    def collect(self, asked: Sequence[PendingGroup]) -> list[list[Trajectory]]:
        """Wait for all groups, and return the answers of each.

        Groups with tokens of weights that are not allowed are sampled again, once, after a sync.

        Raises StaleWeightsError: a group had such tokens twice. Raises EngineError.
        """

        def unanswered() -> list[Future[Any]]:
            self._events.progress(sum(item.answered for item in asked), len(asked))
            return [] if all(item.answers.done() for item in asked) else [item.answers for item in asked]

        self._wait(unanswered, FIRST_EXCEPTION)
        if self._ask_again(asked):
            self._wait(unanswered, FIRST_EXCEPTION)
        return [item.answers.result() for item in asked]

    def sample(self, groups: Sequence[Group], temperature: float, **changed: Any) -> list[Trajectory]:
        """Return the answers of all groups, each with its group's index. changed: parameters that differ from `at`."""
        answers = self.collect(self.admit(groups, replace(self.at(temperature), **changed)))
        return [replace(answer, group=index) for index, group in enumerate(answers) for answer in group]

    def wait_for_some(self, asked: Sequence[PendingGroup], count: int) -> None:
        """Wait until `count` of the groups, or all of them, are answered and judged; see `collect` and `Judge.wait`."""
        wanted = min(count, len(asked))

        def missing() -> list[Future[Any]]:
            if (complete := sum(item.awaited is None for item in asked)) >= wanted:
                return []
            self._events.progress(complete, wanted)
            self.judge.check()
            self._ask_again(asked)
            return [each for item in asked if (each := item.awaited)]

        self._wait(missing, FIRST_COMPLETED)

    def wait_for_fresh(self, asked: Sequence[PendingGroup]) -> None:
        """Wait until a group has a sound answer with a token of the trainer's weights, or all groups are there."""
        version = self.syncing.version

        def unfinished() -> list[Future[Any]]:
            answers = (answer for item in asked if item.answered for answer in item.answers.result())
            if any(version in answer.weight_versions for answer in answers if not answer.failed):
                return []
            return [item.answers for item in asked if not item.answers.done()]

        self._wait(unfinished, FIRST_COMPLETED)

    def _answers(self, group: Group, sampling: SamplingParams) -> Future[list[Trajectory]]:
        ask = self.syncing.engines.admit if self.conversations is None else self.conversations.begin
        return ask(group, sampling, self.syncing.version)

    def _ask_again(self, asked: Sequence[PendingGroup]) -> bool:
        """Sync, and ask again for the groups with tokens of weights that are not allowed. Return whether there are any.
        Raises StaleWeightsError: a group was asked for again before."""
        stale = [item for item in asked if item.answers.done() and _is_stale(item.answers)]
        if not stale:
            return False
        for item in stale:
            if item.asked_again:
                item.answers.result()
        error = stale[0].answers.exception()
        self._events.tell(STALE_RESYNCS, 1, f"stale weights: syncing and sampling again ({error})")
        self.syncing.sync()
        for item in stale:
            item.asked_again = True
            item.expect(self._answers(item.group, item.sampling))
        return True

    def _wait(self, awaited: Callable[[], list[Future[Any]]], until: str) -> None:
        """Wait until `awaited` returns nothing more to wait for; meanwhile sync new engines, report failures, and raise
        errors that a sync cannot repair."""
        with self._turn("rollout"):
            while futures := awaited():
                wait([future for future in futures if not future.done()], timeout=_LOOK_SECONDS, return_when=until)
                self._events.deliver()
                if self.conversations is not None:
                    self.conversations.check()
                self.syncing.sync_new_engines()
                for future in futures:
                    if future.done() and not _is_stale(future):
                        future.result()
        self._events.deliver()


def done(answers: list[Trajectory]) -> Future[list[Trajectory]]:
    """Return a future of answers that are there already."""
    future: Future[list[Trajectory]] = Future()
    future.set_result(answers)
    return future


def _is_stale(answers: Future[Any]) -> bool:
    return not answers.cancelled() and isinstance(answers.exception(), StaleWeightsError)
