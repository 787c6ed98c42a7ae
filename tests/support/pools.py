"""Engines in a test's hand, behind the real sampling: it says when which group is answered, and how."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.events import Events
from fp8rl.rl.run.feed.judging import Judge
from fp8rl.rl.run.feed.sampling import Sampling, done
from fp8rl.rl.run.syncing import DeviceTurns, Syncing
from fp8rl.rollout.types import Endpoint, Group, SamplingParams, Trajectory


@dataclass
class Request:
    """A group that the pool was asked for."""

    group: Group
    sampling: SamplingParams
    answers: Future[list[Trajectory]]


class Pool:
    """In place of `Engines`. at_once: answers when asked; else when told to, and the oldest group whenever
    somebody waits."""

    def __init__(self, reply: Callable[[Group], list[Trajectory]], *, at_once: bool = False) -> None:
        self.reply, self.at_once = reply, at_once
        self.asked: list[Request] = []

    def admit(
        self, group: Group, sampling: SamplingParams, oldest: int, near: object = None
    ) -> Future[list[Trajectory]]:
        answers = done(self.reply(group)) if self.at_once else Future[list[Trajectory]]()
        self.asked.append(Request(group, sampling, answers))
        return answers

    def answer(self, requests: Iterable[Request] | None = None) -> None:
        for request in list(self.asked if requests is None else requests):
            if not request.answers.done():
                request.answers.set_result(self.reply(request.group))

    def waiting(self) -> list[Endpoint]:
        self.answer([request for request in self.asked if not request.answers.done()][:1])
        return []


def sampling_of(pool: Pool, experiment: Experiment, tokenizer: Any, judge: Judge) -> Sampling:
    """Sampling over the pool, for a trainer at version 0."""
    engines, trainer = cast(Any, pool), SimpleNamespace(weight_version=0)
    events, turns = Events(), DeviceTurns()
    syncing = Syncing(cast(Any, SimpleNamespace(trainer=trainer)), engines, events, turns)
    return Sampling(experiment, tokenizer, judge, syncing)


def told(events: Events) -> list[tuple[int, str]]:
    """Each event since the last call: how many there were, and the sentence."""
    found: list[tuple[int, str]] = []
    events.subscribe(lambda metric, count, text: found.append((count, text)))
    events.deliver()
    events._handle = None  # further events wait for the next call
    return found
