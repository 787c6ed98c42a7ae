"""The engines of a run, on actors that play their part: who gets which group, and what becomes of one that is lost.

Real engines that die, hang and come back are in tests/e2e.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import fp8rl.rl.run.background as background_module
import fp8rl.rl.run.engines.engines as engines_module
from fp8rl.rl.run.cluster.reservations import NoRoomError
from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rl.run.engines.engines import Engines
from fp8rl.rl.run.engines.serving import Serving
from fp8rl.rl.run.events import Events
from fp8rl.rollout import types
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import EngineActor
from fp8rl.rollout.engine.server.client import Slept
from fp8rl.rollout.types import Endpoint, EngineDiedError, EngineError, Group, SamplingParams, Trajectory
from fp8rl.trainer.actor import TrainerDiedError
from fp8rl.weight_sync.manifest import Manifest
from tests.support.pools import told
from tests.support.servers import groups, wait_until

SAMPLING = SamplingParams(max_new_tokens=8)
CONFIG = RolloutSection(max_total_tokens=1000, hung_after_s=1.0)
OUT_OF_MEMORY = ray.exceptions.OutOfMemoryError("Memory on the node was 15.2GB / 16.0GB, above the threshold")


class Method:
    """`actor.method.remote(...)`, as Ray has it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


@dataclass
class Actor:
    """An engine that answers when it is told to. dead: raises from then on. hangs: does not answer a pulse. works: its
    schedulers use a processor meanwhile. rests: seconds that it takes to go to sleep. stuck: its end hangs. broken:
    what Ray, or a bug, raises in place of every answer. logprob: of every token."""

    name: str
    version: int = 3
    dead: bool = False
    hangs: bool = False
    works: bool = False
    stuck: bool = False
    broken: Exception | None = None
    logprob: float = -1.0
    failure: Exception | None = None
    holds: dict[str, str] = field(default_factory=lambda: {"a": "1@3"})
    scored: list[list[int]] = field(default_factory=list)
    got: list[Group] = field(default_factory=list)
    ended: bool = False
    rests: float = 0.0
    pulses: int = 0

    def __post_init__(self) -> None:
        self.finish = asyncio.Event()  # set once the group may be answered
        self.finish.set()
        self.places = asyncio.Semaphore(EngineActor._default_options["max_concurrency"])

    def __getattr__(self, name: str) -> Method:
        method = getattr(self, f"_{name}")

        async def call(*args: Any) -> Any:
            async with self.places:  # as Ray's asyncio actors let calls wait
                return await method(*args)

        return Method(call)

    async def _start(self, checkpoint: Path, version: int) -> Endpoint:
        if self.failure is not None:
            raise self.failure
        return Endpoint(self.name, "", "")

    async def _generate(self, asked: list[Group], sampling: SamplingParams) -> list[Trajectory]:
        self.got += asked
        await self._answer(lambda: self.finish.is_set() or self.ended)
        if self.ended:
            raise EngineError("broke the connection")
        each = [(group.prompt.token_ids, seed) for group in asked for seed in group.seeds]
        return [Trajectory(ids, [1], [self.logprob], True, [self.version], 0, seed) for ids, seed in each]

    async def _answer(self, ready: Callable[[], bool]) -> None:
        while not (ready() or self.dead or self.broken):
            await asyncio.sleep(0.01)
        if self.broken is not None:
            raise self.broken
        if self.dead:
            raise EngineDiedError("it was killed\nand more")

    async def _score(self, sequences: list[list[int]]) -> list[list[float]]:
        self.scored += sequences
        await asyncio.sleep(0.05)
        await self._answer(self.finish.is_set)
        return [[-float(token) for token in sequence[1:]] for sequence in sequences]

    async def _manifest(self) -> dict[str, str]:
        while self.hangs:
            await asyncio.sleep(0.01)
        return self.holds

    async def _pulse(self) -> int:
        self.pulses += 1
        while self.hangs:
            await asyncio.sleep(0.01)
        await self._answer(lambda: True)
        return 0

    async def _cpu_seconds(self) -> float:
        return time.monotonic() if self.works else 7.0

    async def _sleep(self) -> Slept:
        await self._answer(lambda: True)
        await asyncio.sleep(self.rests)
        return Slept(7, 5)

    async def _stop(self, grace_s: float = 0.0) -> None:
        while self.stuck:
            await asyncio.sleep(0.01)
        self.ended = True


class Stage:
    """Engines and every actor that was made for them. next: how the actors to come behave. room: whether any may."""

    def __init__(self) -> None:
        self.made: list[Actor] = []
        self.next: dict[str, Any] = {}
        self.events, self.room, self.refused = Events(), True, 0
        self.engines = Engines(0, Serving(self.make, Path("served"), 3), CONFIG, self.events)

    def make(self, index: int) -> Actor:
        if not self.room:
            self.refused += 1
            raise NoRoomError("none is left")
        self.made.append(Actor(f"engine-{index}.{len(self.made)}", **self.next))
        return self.made[-1]

    def open(self, count: int, config: RolloutSection = CONFIG, manifest: Manifest | None = None) -> Engines:
        self.engines = Engines(count, Serving(self.make, Path("served"), 3, manifest), config, self.events)
        self.engines.wait()
        return self.engines

    def news(self) -> list[tuple[int, str]]:
        return told(self.events)

    def serve(self) -> None:
        self.engines.verified(self.engines.up())

    def admit(self, count: int, size: int = 2, oldest: int = 3) -> list[Any]:
        return [self.engines.admit(group, SAMPLING, oldest) for group in groups(count, size)]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(engines_module, "_PULSE_SECONDS", 0.1)
    monkeypatch.setattr(engines_module.ray, "kill", lambda actor: None)
    stage = Stage()
    yield stage
    stage.engines.stop()


def numbers(actor: Actor) -> list[int]:
    """Which of `groups(...)` an actor was given."""
    return [group.prompt.token_ids[0] - 10 for group in actor.got]


def test_groups_go_whole_to_the_engine_with_the_least_to_do_and_wait_for_room(stage: Stage) -> None:
    # Twice that many tokens are room for two groups of two answers of ten tokens.
    stage.open(2, CONFIG.model_copy(update={"max_total_tokens": 20}))
    stage.serve()
    for actor in stage.made:
        actor.finish.clear()
    stage.admit(6)
    assert wait_until(lambda: len(stage.made[0].got) == len(stage.made[1].got) == 2, 5)
    stage.made[1].finish.set()
    assert wait_until(lambda: numbers(stage.made[1]) == [1, 3, 4, 5], 5)
    assert numbers(stage.made[0]) == [0, 2]
    stage.made[0].finish.set()


def test_an_engine_answers_its_pulse_beside_the_turns_of_many_conversations(stage: Stage) -> None:
    stage.open(1, CONFIG.model_copy(update={"max_total_tokens": 100_000}))
    stage.serve()
    (engine,) = stage.made
    engine.finish.clear()
    answers = stage.admit(256, size=1)
    assert wait_until(lambda: len(engine.got) == 256, 5), "none waits for another"
    before = engine.pulses
    assert wait_until(lambda: engine.pulses > before, 5)
    engine.finish.set()
    assert all(len(answer.result(5)) == 1 for answer in answers) and stage.news() == []


def test_no_engine_gets_a_group_before_a_sync_has_verified_it(stage: Stage) -> None:
    engines = stage.open(2)
    answers = stage.admit(2)
    engines.verified(engines.up()[:1])
    assert [len(answer.result(5)) for answer in answers] == [2, 2]
    assert numbers(stage.made[0]) == [0, 1] and stage.made[1].got == []
    assert [endpoint.url for endpoint in engines.waiting()] == ["engine-1.1"]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({"dead": True}, "engine 0 is lost and replaced: it was killed"),
        ({"broken": OUT_OF_MEMORY}, "the actor of the engine is gone: Memory on the node was 15.2GB"),
    ],
    ids=["dead", "out of memory"],
)
def test_groups_of_a_lost_engine_are_asked_of_another_by_seed(stage: Stage, loss: dict[str, Any], said: str) -> None:
    engines = stage.open(2)
    stage.serve()
    stage.made[0].finish.clear()
    answers, there = stage.admit(2), engines.up()
    assert wait_until(lambda: stage.made[0].got != [], 5) and not engines.any_lost(there)
    vars(stage.made[0]).update(loss)
    assert [[t.seed for t in answer.result(10)] for answer in answers] == [[0, 1], [2, 3]]
    assert numbers(stage.made[1]) == [1, 0]
    assert wait_until(lambda: len(engines.up()) == 2, 5) and engines.any_lost(there)
    assert [endpoint.url for endpoint in engines.waiting()] == ["engine-0.2"], "no groups before a sync"
    ((count, text),) = stage.news()
    assert count == 1 and said in text and stage.news() == []


def test_an_error_that_nobody_foresaw_reaches_all_who_wait(stage: Stage) -> None:
    engines = stage.open(2)
    (answer,) = stage.admit(1)
    stage.made[0].broken = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        answer.result(10)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engines.up()


@pytest.mark.slow
def test_an_engine_in_a_long_pass_is_waited_for_as_long_as_its_schedulers_work(stage: Stage) -> None:
    stage.open(1, CONFIG.model_copy(update={"hung_after_s": 1.0}))
    stage.serve()
    (engine,) = stage.made
    engine.works = engine.hangs = True
    time.sleep(2.5)
    assert stage.news() == [] and len(stage.made) == 1
    engine.hangs = False
    assert len(stage.admit(1)[0].result(5)) == 2
    engine.hangs, engine.works = True, False
    assert wait_until(lambda: len(stage.made) == 2, 10), "a lock that is never free"
    assert "(rollout.hung_after_s)" in stage.news()[0][1]


@pytest.mark.slow
def test_an_engine_that_never_answers_is_replaced_in_the_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutSection, "longest_pass_s", 2.0)
    stage.open(1)
    stage.made[0].works = stage.made[0].hangs = True
    assert wait_until(lambda: len(stage.made) == 2, 10)
    assert "has not answered for 2 s" in stage.news()[0][1]


def test_a_lost_engine_is_known_while_another_is_in_a_long_pass(stage: Stage) -> None:
    engines = stage.open(2)
    there, (busy, killed) = engines.up(), stage.made
    busy.works = busy.hangs = killed.dead = True
    assert engines.any_lost(there) and engines.slots[0].endpoint, "nobody waited until the long pass was given up"
    busy.hangs = False


@pytest.mark.slow
def test_an_engine_in_a_long_pass_goes_to_sleep_after_it(stage: Stage) -> None:
    engines = stage.open(1)
    stage.made[0].works, stage.made[0].rests = True, 1.5
    assert engines.sleep() == [Slept(7, 5)] and stage.news() == []


@pytest.mark.parametrize("lost", [False, True])
def test_engines_of_which_one_does_not_end_say_so_and_kill_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    """lost: its end has begun before, because it was lost."""
    killed: list[Any] = []
    monkeypatch.setattr(engines_module, "_END_SECONDS", 0.5)
    monkeypatch.setattr(engines_module.ray, "kill", killed.append)
    engines = stage.open(2)
    stage.made[1].stuck, stage.made[1].dead = True, lost
    assert wait_until(lambda: (engines.slots[1].endpoint is None) is lost, 5)
    engines.stop()
    assert "found no end of the engines within 0.5 s" in caplog.text and stage.made[1] in killed
    engines.stop()
    stage.made[1].stuck = False


def test_one_loss_too_many_within_an_hour_ends_the_run_and_a_failed_start_counts(stage: Stage) -> None:
    engines = stage.open(1, CONFIG.model_copy(update={"restarts_per_hour": 2}))
    (answer,) = stage.admit(1)
    stage.made[0].dead = True
    assert wait_until(lambda: len(stage.made) == 2, 10)
    stage.next = {"failure": EngineError("no such GPU")}
    stage.made[1].dead = True
    with pytest.raises(EngineError, match=r"3 engines lost within an hour, expected at most 2 .*: no such GPU"):
        answer.result(10)
    with pytest.raises(EngineError, match="lost within an hour"):
        engines.up()
    assert len(stage.made) == 3


@pytest.mark.slow
def test_a_sync_says_once_for_which_node_it_waits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "_EVENT_SECONDS", 0.05)
    engines, told = stage.open(1, CONFIG.model_copy(update={"restarts_per_hour": 1})), list[str]()
    stage.serve()
    stage.events.subscribe(lambda metric, count, text: told.append(text))
    stage.room, stage.made[0].dead = False, True  # its node has left
    assert wait_until(lambda: stage.engines.slots[0].endpoint is None, 5)
    comes_back = threading.Thread(target=lambda: setattr(stage, "room", wait_until(lambda: stage.refused > 3, 10)))
    comes_back.start()
    assert [endpoint.url for endpoint in engines.up()] == ["engine-0.1"]
    comes_back.join()
    assert told == ["engine 0 is lost and replaced: it was killed", "engine 0 waits for a node: none is left"]


def test_digests_are_those_of_engines_that_get_groups_and_answer(stage: Stage) -> None:
    engines = stage.open(2)
    assert engines.wait() is None and engines.held() == [], "nothing is verified yet"
    stage.serve()
    stage.made[1].holds = {"a": "2@3"}
    assert engines.held() == [{"a": "1@3"}, {"a": "2@3"}]
    stage.made[0].hangs = True
    assert engines.held() == [{"a": "2@3"}]


@pytest.mark.parametrize("failure", [EngineError("no such GPU"), OUT_OF_MEMORY, None], ids=str)
def test_what_goes_wrong_at_the_first_start_is_raised(stage: Stage, failure: Exception | None) -> None:
    stage.next, stage.room = {"failure": failure}, failure is not None
    with pytest.raises(EngineError if failure else NoRoomError, match="no such GPU|Memory on the node|none is left"):
        stage.open(2)


def test_tokens_of_other_weights_than_expected_are_refused(stage: Stage) -> None:
    engines = stage.open(1)
    stage.serve()
    with pytest.raises(types.StaleWeightsError, match="expected all at versions 2 to 4"):
        stage.made[0].version = 5
        engines.expect(4)
        stage.admit(1, oldest=2)[0].result(5)
    engines.expect(5)
    assert len(stage.admit(1, oldest=2)[0].result(5)) == 2


MANIFEST = Manifest("3", "spec", {"a": "1@3"})
"""Of weights that never change."""


def test_engines_that_hold_what_their_files_say_work_without_a_sync(stage: Stage) -> None:
    engines = stage.open(2, manifest=MANIFEST)
    assert engines.waiting() == []
    scores = [engines.score([[1, 2, 3], [4, 5]]) for _ in range(2)]
    assert [score.result(5) for score in scores] == [[[-2.0, -3.0], [-5.0]]] * 2
    assert [len(actor.scored) for actor in stage.made] == [2, 2], "each gets what the other has no time for"


def test_what_a_dead_engine_was_to_score_another_scores(stage: Stage) -> None:
    engines = stage.open(1, manifest=MANIFEST)
    stage.made[0].finish.clear()
    score = engines.score([[1, 2]])
    assert wait_until(lambda: stage.made[0].scored != [], 5)
    stage.made[0].dead = True
    assert score.result(10) == [[-2.0]] and len(stage.made) == 2
    assert [text for _, text in stage.news()] == ["engine 0 is lost and replaced: it was killed"]


def test_an_engine_that_holds_other_weights_than_its_files_is_refused(stage: Stage) -> None:
    stage.next = {"holds": {"a": "2@3"}}
    with pytest.raises(EngineError, match="engine 0 does not hold what its checkpoint served holds.*\n.*a: found 2@3"):
        stage.open(1, manifest=MANIFEST)
    assert wait_until(lambda: stage.made[0].ended, 5)


def test_an_engine_that_does_not_go_to_sleep_is_lost_before_its_memory_is_used(stage: Stage) -> None:
    engines = stage.open(2)
    stage.serve()
    stage.made[1].dead = True
    assert engines.sleep() == [Slept(7, 5)]
    assert stage.made[1].ended and len(engines.waiting()) == 1


Check = tuple[Canary, int, Callable[[], torch.Tensor]]


def check(exact: bool = True, version: int = 3, scored: Callable[[], torch.Tensor] | None = None) -> Check:
    """A canary of one token, of which the trainer says -1."""
    canary = Canary([5], [1], seed=-7, exact=exact)
    return canary, version, scored or (lambda: torch.tensor([[0.0, -1.0]]))


def test_no_answer_counts_before_the_canary_of_its_engine_is_right(stage: Stage) -> None:
    engines, known = stage.open(1), threading.Event()

    def scored() -> torch.Tensor:
        assert known.wait(30)
        return torch.tensor([[0.0, -1.0]])

    engines.run_canaries(engines.up(), *check(scored=scored))
    stage.serve()
    (answer,) = stage.admit(1)
    assert wait_until(lambda: len(stage.made[0].got) == 2, 5), "it works meanwhile"
    time.sleep(0.2)
    assert not answer.done() and engines.canaries() == {}
    known.set()
    assert len(answer.result(5)) == 2
    assert engines.canaries() == {"sync/canary_diff": 0.0} and engines.canaries() == {}


def test_an_engine_whose_canary_differs_is_replaced_and_what_it_answered_is_asked_of_another(stage: Stage) -> None:
    engines = stage.open(2)
    stage.made[0].logprob = -1.25
    synced = engines.up()
    engines.run_canaries(synced, *check())
    engines.verified(synced)  # not what may already stand in the place of the one with the other canary
    answers = [answer.result(5) for answer in stage.admit(2)]
    assert {t.logprobs[0] for answer in answers for t in answer} == {-1.0}
    assert [t.seed for answer in answers for t in answer] == [0, 1, 2, 3]
    assert wait_until(lambda: len(stage.made) == 3 and engines.waiting() != [], 10)
    assert engines.canaries() == {"sync/canary_diff": 0.25}
    ((count, text),) = stage.news()
    assert count == 1 and text.startswith("engine 0 is lost and replaced: its canary differs by 0.25 nats")


@pytest.mark.parametrize(
    ("tokens", "engine", "difference"),
    [
        ([1, 2], [-1.0, -1.0], 0.25),
        ([1, 2], [-1.5, -1.0], 0.25),
        ([1, 3], [-1.25, -1.0], math.inf),
        ([1, 2], [-1.25, math.nan], math.inf),
    ],
)
def test_a_canary_differs_by_its_worst_token(tokens: list[int], engine: list[float], difference: float) -> None:
    canary = Canary([5], [1, 2], seed=-7, exact=True)
    answer = Trajectory([5], tokens, engine, True, [3, 3], 0, canary.seed)
    assert canary.difference(answer, torch.tensor([[0.0, -1.25, -1.0]])) == difference


@pytest.mark.parametrize(("exact", "version", "metrics"), [(False, 3, {"sync/canary_diff": 0.25}), (True, 2, {})])
def test_the_canary_of_native_mode_or_of_an_earlier_sync_replaces_no_engine(
    stage: Stage, exact: bool, version: int, metrics: dict[str, float]
) -> None:
    engines = stage.open(1)
    stage.made[0].logprob = -1.25
    engines.run_canaries(engines.up(), *check(exact=exact, version=version))
    stage.serve()
    assert stage.admit(1)[0].result(5)[0].logprobs == [-1.25]
    assert engines.canaries() == metrics and stage.news() == [] and len(stage.made) == 1


def test_a_trainer_that_dies_keeps_no_answer_back_and_a_bug_reaches_who_waits(stage: Stage) -> None:
    error: Exception = TrainerDiedError("gone")

    def raises() -> torch.Tensor:
        raise error

    engines = stage.open(1)
    engines.run_canaries(engines.up(), *check(scored=raises))
    stage.serve()
    assert len(stage.admit(1)[0].result(5)) == 2 and stage.news() == []
    error = ZeroDivisionError("a bug")
    engines.run_canaries(engines.up(), *check(scored=raises))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        stage.admit(1)[0].result(5)
