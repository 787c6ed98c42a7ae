"""The engines of a run, as one: groups spread over those that serve, and another in place of one that is lost."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import ray

from numerics.config import NumericsConfig
from numerics.errors import UserError
from rl.experiment import Experiment
from rl.run.background import Background
from rl.run.cluster.seats import NoRoomError, Seats
from rl.run.engines.serving import Serving, engine_maker
from rl.run.engines.slot import Slot
from rollout.config import RolloutConfig
from rollout.errors import EngineDiedError, EngineError
from rollout.sampler import check_versions
from rollout.types import Endpoint, Group, SamplingParams, Trajectory

_STOP_SECONDS = 6.0
_PULSE_SECONDS = 2.0
"""Between two looks at an engine."""
_DYING_SECONDS = 2.0
"""A connection breaks a moment before its process is gone."""
_HOUR = 3600.0


@dataclass(frozen=True)
class News:
    """replaced: engines that are, of which this tells."""

    replaced: int
    text: str


class EnginePool:
    """Ray actors that own one server each. Any engine answers any group, and a group comes back whole whatever happens
    to the engine that it was given to.

    Engines are watched and replaced in a thread of the pool's own, also while the trainer trains. A new one gets no
    group before a sync: the owner of the trainer's weights asks `up` whom to send them, and says `verified`. One whose
    weights never change has its digests compared with those of its files instead (`Serving.manifest`).

    Raises:
        EngineError: from any method that waits, when more engines were lost within an hour than the spec allows.
    """

    def __init__(self, count: int, serving: Serving | None, config: RolloutConfig, name: str = "engine") -> None:
        """Begin to start `count` engines. name: what messages call one."""
        self._serving, self._config, self._name = serving, config, name
        self._newest = serving.version if serving is not None else 0
        self._slots: list[Slot] = []
        self._losses: deque[float] = deque()
        self._news: deque[News] = deque()
        self._near: WeakKeyDictionary[object, Slot] = WeakKeyDictionary()
        self._failure: Exception | None = None
        self._maker = ThreadPoolExecutor(1, "engine-maker")
        self._background = Background("engines") if count else None
        if self._background is not None:
            self._background.run(self._open(count))

    @classmethod
    def none(cls) -> EnginePool:
        """No engines: of a run that samples nothing."""
        return cls(0, None, RolloutConfig())

    @classmethod
    def start(
        cls,
        experiment: Experiment,
        seats: Seats,
        folder: Path,
        numerics: NumericsConfig,
        checkpoint: Path,
        version: int = 0,
    ) -> EnginePool:
        """Begin to start all engines, on `numerics`, from an HF directory in the served format; `wait` for them.

        folder: for their logs.
        """
        make = engine_maker(experiment, seats, folder, numerics)
        return cls(experiment.rollout.engines, Serving(make, checkpoint, version), experiment.rollout)

    def __len__(self) -> int:
        return len(self._slots)

    def wait(self) -> None:
        """Until every engine answers and has passed the handshake. Raises what went wrong at the first start."""
        self._run(self._all_up())

    def up(self) -> list[Endpoint]:
        """Every engine that can be sent weights; waits until there is one."""
        return self._run(self._up())

    def waiting(self) -> list[Endpoint]:
        """Engines that are up and get no groups until a sync has verified their weights."""
        return [slot.endpoint for slot in self._slots if slot.endpoint is not None and not slot.serving]

    def expect(self, version: int) -> None:
        """From now on answers may come from weights up to `version`."""
        self._newest = version

    def verified(self, endpoints: Sequence[Endpoint]) -> None:
        """A sync found these engines to hold the trainer's weights: they get groups."""
        self._run(self._verified(endpoints))

    def any_lost(self, endpoints: Sequence[Endpoint]) -> bool:
        """Whether one of these engines is gone. Looks for a while before it says no."""
        return self._run(self._any_lost(endpoints))

    def admit(
        self, group: Group, sampling: SamplingParams, oldest: int, near: object = None
    ) -> Future[list[Trajectory]]:
        """Have a group answered, by the engine with the least to do. An engine's loss is not noticed in the answer.

        near: groups with the same one go to the same engine, as long as it is there and has room.

        Raises StaleWeightsError, in time, for a token of weights before `oldest` or after those of `expect`.
        """
        assert self._background is not None
        return self._background.begin(self._answer(group, sampling, oldest, near))

    def score(self, sequences: list[list[int]]) -> Future[list[list[float]]]:
        """Have sequences scored, see `EngineClient.score`, by the engine with the least to do."""
        assert self._background is not None
        return self._background.begin(self._scores(sequences))

    def switch(self, serving: Serving) -> None:
        """Replace all engines by others; groups under way are answered by these."""
        self._run(self._switch(serving))

    def figures(self) -> dict[str, float]:
        """`perf/engine_...` since this was last asked; nothing without engines."""
        now = time.monotonic()
        idle = [slot.idle + (0.0 if slot.answers else now - slot.idle_since) for slot in self._slots]
        tokens = [slot.tokens for slot in self._slots]
        for slot in self._slots:
            slot.idle, slot.tokens, slot.idle_since = 0.0, 0, now
        if not idle:
            return {}
        balance = {"perf/engine_balance": min(tokens) / max(tokens)} if len(tokens) > 1 and max(tokens) else {}
        return {"perf/engine_idle_seconds": sum(idle) / len(idle), **balance}

    def news(self) -> list[News]:
        """What has happened to engines since this was last asked."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def stop(self) -> None:
        """End all servers and their actors; a second call does nothing."""
        if self._background is None:
            return
        background, self._background = self._background, None
        background.close()
        self._maker.shutdown(wait=False, cancel_futures=True)
        actors = [slot.actor for slot in self._slots if slot.actor is not None]
        calls = [actor.stop.remote() for actor in actors]
        ray.wait(calls, num_returns=len(calls), timeout=_STOP_SECONDS)
        for actor in actors:
            ray.kill(actor)  # a server that is still there dies with its actor
        self._slots = []

    def _run(self, coroutine: Any) -> Any:
        assert self._background is not None, "there are no engines"
        return self._background.run(coroutine)

    # The rest runs in the pool's thread.

    async def _open(self, count: int) -> None:
        self._change = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._slots = [Slot(index, loop.create_future()) for index in range(count)]
        self._lives = [asyncio.create_task(self._live(slot)) for slot in self._slots]

    async def _live(self, slot: Slot) -> None:
        """Keep an engine in a slot. An error of the first start ends the pool, for `wait` to raise."""
        first, failures = True, 0
        while self._failure is None:
            try:
                reason = await self._life(slot, first)
                failures = 0
            except (EngineError, NoRoomError, UserError) as error:
                if first:
                    self._failure = error
                failures += 1
                reason = str(error)
            first = False
            actor, slot.actor = slot.actor, None  # what it still answers is of an engine that is gone
            slot.endpoint, slot.serving, slot.load = None, False, None
            slot.lost = asyncio.get_running_loop().create_future()
            if reason and self._failure is None:
                self._note_loss(slot, reason)
            self._changed()
            await self._end(actor)
            await asyncio.sleep(min(2.0**failures, 30.0) if failures else 0.0)

    async def _life(self, slot: Slot, first: bool) -> str:
        """One engine from its start to where it has to be replaced; why, empty if that is nobody's fault."""
        serving, patience = self._serving, self._config.hung_after_s
        assert serving is not None
        actor = slot.actor = await self._made(serving, slot, patient=not first)
        endpoint = await _call(actor.start.remote(serving.checkpoint, serving.version))
        if serving is not self._serving:
            return ""  # the pool was switched meanwhile
        if serving.manifest is not None:
            differing = serving.manifest.differences(await _call(actor.held.remote()))
            if differing:
                raise EngineError(
                    f"{self._name} {slot.index} does not hold what its checkpoint {serving.checkpoint} holds; give the "
                    "run another disk, or this one a look:\n" + "\n".join(differing[:20])
                )
        slot.endpoint, slot.serving = endpoint, serving.manifest is not None
        self._changed()
        while True:
            await asyncio.wait([slot.lost], timeout=_PULSE_SECONDS)
            if slot.lost.done():
                return slot.lost.result()
            try:
                slot.load = await asyncio.wait_for(_call(actor.pulse.remote()), patience)
            except TimeoutError:
                return f"it has not answered for {patience:g} s (rollout.hung_after_s), though its process is there"
            except EngineError as error:
                return str(error)

    async def _made(self, serving: Serving, slot: Slot, patient: bool) -> Any:
        """The actor of an engine; patient: once a node has room for it, which is said to be waited for."""
        waits = False
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._maker, serving.make, slot.index)
            except NoRoomError as error:
                if not patient:
                    raise
                if not waits:
                    self._news.append(News(0, f"{self._name} {slot.index} waits for a node: {error}"))
                waits = True
            await asyncio.sleep(_PULSE_SECONDS)

    async def _end(self, actor: Any) -> None:
        """End an engine whatever state it is in. A process that is stopped would not notice that its owner died."""
        if actor is None:
            return
        try:
            await asyncio.wait_for(_call(actor.stop.remote(0.0)), _STOP_SECONDS)
        except (TimeoutError, EngineError):
            pass
        ray.kill(actor)

    def _note_loss(self, slot: Slot, reason: str) -> None:
        now, budget = time.monotonic(), self._config.restarts_per_hour
        self._losses.append(now)
        while self._losses[0] < now - _HOUR:
            self._losses.popleft()
        first_line = reason.splitlines()[0]
        if len(self._losses) > budget:
            self._failure = EngineError(
                f"found {len(self._losses)} {self._name}s lost within an hour, expected at most {budget} "
                f"(rollout.restarts_per_hour). The last one, {self._name} {slot.index}: {reason}"
            )
        else:
            self._news.append(News(1, f"{self._name} {slot.index} is lost and replaced: {first_line}"))

    async def _answer(self, group: Group, sampling: SamplingParams, oldest: int, near: object) -> list[Trajectory]:
        longest = len(group.prompt.token_ids) + sampling.max_new_tokens
        answers: list[Trajectory]
        slot, answers = await self._asked(
            len(group.seeds), longest, lambda actor: actor.generate.remote([group], sampling), near
        )
        slot.tokens += sum(len(answer.token_ids) for answer in answers)
        check_versions(answers, oldest, self._newest)
        return answers

    async def _scores(self, sequences: list[list[int]]) -> list[list[float]]:
        longest = max(map(len, sequences))
        scores: list[list[float]]
        _, scores = await self._asked(len(sequences), longest, lambda actor: actor.score.remote(sequences))
        return scores

    async def _asked(
        self, count: int, longest: int, ask: Callable[[Any], Any], near: object = None
    ) -> tuple[Slot, Any]:
        """What an engine answers to a request for `count` sequences, and which one: another if the first is lost.

        longest: tokens that one of them may have in the end. near: see `admit`.
        """
        while True:
            slot = await self._chosen(count, longest, near)
            actor = slot.actor
            slot.give(count)
            try:
                return slot, await _call(ask(actor))
            except EngineDiedError as died:
                slot.lose(actor, str(died))
            except EngineError:
                if actor is slot.actor and not slot.lost.done():
                    raise
                # else it was ended while it worked
            finally:
                slot.take(count)
                self._changed()

    async def _chosen(self, count: int, longest: int, near: object) -> Slot:
        """The serving engine that `near` has been at; else the one with the fewest answers under way, and among equals
        with the fewest tokens.

        No engine is given more than twice what its KV cache holds: the rest waits for whichever is free first.
        """
        room = max(2 * self._config.max_total_tokens // longest, count)
        while True:
            self._raise_failure()
            free = [slot for slot in self._slots if slot.serving and slot.answers + count <= room]
            if near is not None and (before := self._near.get(near)) in free:
                return before
            if free:
                slot = min(free, key=lambda slot: (slot.answers, slot.load.tokens if slot.load else 0, slot.index))
                if near is not None:
                    self._near[near] = slot
                return slot
            await self._change.wait()

    async def _all_up(self) -> None:
        while not all(slot.endpoint for slot in self._slots):
            self._raise_failure()
            await self._change.wait()

    async def _up(self) -> list[Endpoint]:
        while True:
            self._raise_failure()
            there = [slot.endpoint for slot in self._slots if slot.endpoint is not None]
            if there:
                return there
            await self._change.wait()

    async def _verified(self, endpoints: Sequence[Endpoint]) -> None:
        for slot in self._slots:
            slot.serving = slot.serving or (slot.endpoint in endpoints and not slot.lost.done())
        self._changed()

    async def _any_lost(self, endpoints: Sequence[Endpoint]) -> bool:
        deadline = time.monotonic() + _DYING_SECONDS
        while time.monotonic() < deadline:
            held = {slot.endpoint: slot for slot in self._slots if not slot.lost.done()}
            for endpoint in endpoints:
                slot = held.get(endpoint)
                if slot is None:
                    return True
                actor = slot.actor  # while it answers, another may take its place
                try:
                    alive = (await _call(actor.health.remote())).alive
                except EngineDiedError:
                    alive = False
                if not alive:
                    slot.lose(actor, "its process is gone")
                    return True
            await asyncio.sleep(0.1)
        return False

    async def _switch(self, serving: Serving) -> None:
        self._serving, self._newest = serving, serving.version
        for slot in self._slots:
            slot.endpoint = None
            slot.lose(slot.actor, "")
        await self._all_up()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _changed(self) -> None:
        """Wake whoever waits for an engine to be free, up or lost."""
        self._change.set()
        self._change = asyncio.Event()


async def _call(reference: Any) -> Any:
    """What an actor answers; its exception comes out as what it was, the actor's own end as EngineDiedError."""
    try:
        return await reference
    except ray.exceptions.RayActorError as error:
        raise EngineDiedError(f"the actor of the engine is gone: {error}") from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
