"""Has engines sample groups of answers, waits for the groups, and has them judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from fp8rl.rl.run.engines.engines import Engines
from fp8rl.rl.run.events import STALE_RESYNCS, Events, Failures
from fp8rl.rl.run.feed.conversations import Conversations
from fp8rl.rl.run.feed.judging import Judge, JudgedAnswer
from fp8rl.rl.run.syncing import DeviceTurns, Syncing
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.tasks.chat import end_ids
from fp8rl.rollout.types import Group, SamplingParams, StaleWeightsError, Trajectory

_LOOK_SECONDS = 0.1
"""Interval of the check whether a new engine waits for weights."""


class PendingGroup:
    """A group that engines were asked for at the monotonic time `began`, and its answers and verdicts as they come.

    The future `answers` has the order of the group's seeds. `number`: of the prompt in the run or in its set, from 0.
    """

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
        self.began = time.monotonic()
        self._judge, self._lock = judge, threading.Lock()
        self._judged: tuple[list[Trajectory], Future[list[JudgedAnswer]]] | None = None
        self.asked_again = False
        self.expect(answers)

    def expect(self, answers: Future[list[Trajectory]]) -> None:
        """Wait for these answers in place of former ones, which cannot be used."""
        self.answers = answers
        if self._judge is not None:
            answers.add_done_callback(lambda answers: self._begin(answers) if _are_there(answers) else None)

    @property
    def answered(self) -> bool:
        """Return whether all answers are there without an error."""
        return _are_there(self.answers)

    @property
    def awaited(self) -> Future[Any] | None:
        """The next future of the group: the answers, then the verdicts on them; None if all are there."""
        pending = self._begin(self.answers) if self.answered else self.answers
        return None if self.answered and pending.done() else pending

    def judged(self) -> list[JudgedAnswer]:
        """Wait for the verdict on each answer. The answers must be there."""
        assert self._judge is not None
        return self._judge.wait(self._begin(self.answers))

    def _begin(self, answers: Future[list[Trajectory]]) -> Future[list[JudgedAnswer]]:
        assert self._judge is not None
        with self._lock:  # the end of the answers is noticed in a thread of its own
            if self._judged is None or self._judged[0] is not answers.result():
                found = answers.result()
                self._judged = found, self._judge.begin(self.group.prompt, found, taught=True)
            return self._judged[1]


@dataclass
class Sampling:
    """Has engines sample groups. During a wait it also sends the trainer's weights to new engines."""

    rollout: RolloutSection
    """The `rollout` section of the spec."""
    tokenizer: PreTrainedTokenizerBase
    engines: Engines
    conversations: Conversations | None
    """The environment's conversations; None if an answer is one turn of the model."""
    judge: Judge
    """Gives answers their rewards."""
    syncing: Syncing
    events: Events
    turns: DeviceTurns
    carries_supports: bool = False
    """See `Experiment.carries_supports`."""
    likeliest: int = 0
    """See `AlgorithmConfig.likeliest`."""

    def __post_init__(self) -> None:
        self._ends = end_ids(self.tokenizer)

    @property
    def failures(self) -> list[Failures]:
        """The failure counts of the run's environment and rewards."""
        return [self.judge.failures] + ([] if self.conversations is None else [self.conversations.failures])

    def at(self, temperature: float) -> SamplingParams:
        """Return the experiment's sampling parameters at a temperature; 0 is greedy."""
        drawn = self.rollout.sampling(temperature, self._ends)
        if temperature == 0:
            return drawn
        return replace(drawn, supports=self.carries_supports, likeliest=self.likeliest)

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
        self._wait(asked)
        if self._ask_again(asked):
            self._wait(asked)
        return [item.answers.result() for item in asked]

    def sample(self, groups: Sequence[Group], temperature: float) -> list[Trajectory]:
        """Return the answers of all groups at the trainer's weights; `Trajectory.group` is the index of the group."""
        answers = self.collect(self.admit(groups, self.at(temperature)))
        return [replace(answer, group=index) for index, group in enumerate(answers) for answer in group]

    def wait_for_some(self, asked: Sequence[PendingGroup], count: int) -> None:
        """Wait until `count` of the groups, or all of them, are answered and judged; see `collect` and `Judge.wait`."""
        wanted, looked = min(count, len(asked)), time.monotonic()
        with self.turns.turn("rollout"):
            while (complete := sum(item.awaited is None for item in asked)) < wanted:
                self.events.progress(complete, wanted)
                self._ask_again(asked)
                self._wait_briefly([each for item in asked if (each := item.awaited)], FIRST_COMPLETED)
                if time.monotonic() - looked > self.judge.patience:
                    self.judge.check_turns()
                    looked = time.monotonic()
        self.events.deliver()

    def wait_for_fresh(self, asked: Sequence[PendingGroup]) -> None:
        """Wait until a group has a sound answer with a token of the trainer's weights, or all groups are there."""
        version = self.syncing.version

        def fresh(item: PendingGroup) -> bool:
            return item.answered and any(
                version in answer.weight_versions for answer in item.answers.result() if not answer.failed
            )

        with self.turns.turn("rollout"):
            while not any(map(fresh, asked)) and (under_way := [a for a in asked if not a.answers.done()]):
                self._wait_briefly([item.answers for item in under_way], FIRST_COMPLETED)
        self.events.deliver()

    def _answers(self, group: Group, sampling: SamplingParams) -> Future[list[Trajectory]]:
        ask = self.engines.admit if self.conversations is None else self.conversations.begin
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
        self.events.tell(STALE_RESYNCS, 1, f"stale weights: syncing and sampling again ({error})")
        self.syncing.sync()
        for item in stale:
            item.asked_again = True
            item.expect(self._answers(item.group, item.sampling))
        return True

    def _wait(self, asked: Sequence[PendingGroup]) -> None:
        with self.turns.turn("rollout"):
            while not all(item.answers.done() for item in asked):
                self.events.progress(sum(item.answered for item in asked), len(asked))
                self._wait_briefly([item.answers for item in asked], FIRST_EXCEPTION)
        self.events.progress(len(asked), len(asked))
        self.events.deliver()

    def _wait_briefly(self, answers: Sequence[Future[Any]], until: str) -> None:
        """Wait a moment for answers; meanwhile sync new engines, report failures, and raise errors that a sync cannot
        repair."""
        wait([future for future in answers if not future.done()], timeout=_LOOK_SECONDS, return_when=until)
        self.events.deliver()
        self.events.tell_failures(*self.failures, only_if_explained=True)  # the first one is told when it happens
        if self.conversations is not None:
            self.conversations.check()
        self.syncing.sync_new_engines()
        for future in answers:
            if future.done() and not _is_stale(future):
                future.result()


def done(answers: list[Trajectory]) -> Future[list[Trajectory]]:
    """Return a future of answers that are there already."""
    future: Future[list[Trajectory]] = Future()
    future.set_result(answers)
    return future


def _are_there(answers: Future[list[Trajectory]]) -> bool:
    return answers.done() and not answers.cancelled() and answers.exception() is None


def _is_stale(answers: Future[Any]) -> bool:
    return not answers.cancelled() and isinstance(answers.exception(), StaleWeightsError)
