"""All engines of a run behind one interface, which gives each group to an engine and replaces lost engines."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import ray
from torch import Tensor

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.background import Background, begun, waited
from fp8rl.rl.run.cluster.reservations import NoRoomError
from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rl.run.engines.serving import Serving
from fp8rl.rl.run.engines.slot import EngineSlot, end_engine
from fp8rl.rl.run.events import ENGINES_REPLACED, Events
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.deadlines import end
from fp8rl.rollout.engine.engine import SERVER_GRACE_S, Engine, call
from fp8rl.rollout.engine.server.answers import check_versions
from fp8rl.rollout.engine.server.client import Slept
from fp8rl.rollout.types import Endpoint, EngineDiedError, EngineError, Group, SamplingParams, Trajectory

Result = TypeVar("Result")

_END_SECONDS = 30.0
"""Longest time in which all engines end. Each is told to end, and killed a few seconds later."""
_PULSE_SECONDS = 2.0
"""Interval at which each engine's health is checked."""
_HOUR = 3600.0


class Engines:
    """The engines of a run: Ray actors that own a server each. A thread watches and replaces them, in training too.

    Any engine answers any group. A group's answers come back complete, even if its engine is lost.

    A new engine gets no group before a sync: the owner of the trainer's weights sends them to the engines that `up`
    returns, and then calls `verified`. An engine whose weights never change is checked against the digests of its files
    instead (`Serving.manifest`). If an engine cannot be replaced, every waiting call raises the error.

    Only the event loop of this object writes the `slots`, which have one engine each.
    Raises EngineError: from any method that waits, when more engines were lost within an hour than the spec allows.
    """

    def __init__(self, count: int, serving: Serving, config: RolloutSection, events: Events) -> None:
        """Begin to start `count` engines; `wait` waits for them. With `rollout.sleep` they first wait for `wake`."""
        self._serving, self._config, self._events = serving, config, events
        self._name = "engine" if serving.role == "policy" else f"{serving.role} engine"
        self._newest = serving.version
        self.slots: list[EngineSlot] = []
        self._losses: deque[float] = deque()
        self._differences: list[float] = []
        self._near: WeakKeyDictionary[object, EngineSlot] = WeakKeyDictionary()
        self._failure: Exception | None = None
        self._maker = ThreadPoolExecutor(1, "engine-maker")
        self._background = Background("engines")
        self._open(count)

    def __len__(self) -> int:
        return len(self.slots)

    def stop(self) -> None:
        """End all servers and their actors; a second call does nothing."""
        if self._background.closed:
            return
        try:
            self._background.run(self._close(), _END_SECONDS)
        except TimeoutError:
            logging.getLogger(__name__).warning("found no end of the engines within %g s: killing them", _END_SECONDS)
            for slot in self.slots:
                if slot.actor is not None:
                    ray.kill(slot.actor)  # a server dies with its actor
        self._background.close()

    @waited
    async def _open(self, count: int) -> None:
        self._change, self._awake = asyncio.Event(), asyncio.Event()
        if not self._config.sleep:
            self._awake.set()
        self.slots = [EngineSlot(index, self._config) for index in range(count)]
        self._slot_tasks = [asyncio.create_task(self._run_slot(slot)) for slot in self.slots]

    async def _close(self) -> None:
        await end(*self._slot_tasks)
        self._maker.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(end_engine(slot.actor, self._name, SERVER_GRACE_S) for slot in self.slots))

    @waited
    async def wait(self) -> None:
        """Wait until every engine answers and has passed the handshake. Raises what went wrong at the first start."""
        await self._until(lambda: all(slot.endpoint for slot in self.slots))

    @waited
    async def up(self) -> list[Endpoint]:
        """Return every engine that can be sent weights; wait until there is one."""
        assert self.slots, "there are no engines"
        return await self._until(lambda: [slot.endpoint for slot in self.slots if slot.endpoint])

    @waited
    async def waiting(self) -> list[Endpoint]:
        """Return the engines that are up, but get no groups until a sync has verified their weights."""
        return [slot.endpoint for slot in self.slots if slot.endpoint and not slot.serving]

    @waited
    async def expect(self, version: int) -> None:
        """Accept answers from weights up to `version` from now on."""
        self._newest = version

    @waited
    async def verified(self, endpoints: Sequence[Endpoint]) -> None:
        """Note that these engines hold the trainer's weights, so that they get groups."""
        for slot in self.slots:
            slot.serving = slot.serving or slot.endpoint in endpoints
        self._changed()

    @waited
    async def run_canaries(
        self, endpoints: Sequence[Endpoint], canary: Canary, version: int, score: Callable[[], Tensor]
    ) -> None:
        """Have engines that a sync has just verified answer a canary. Their other answers wait for the canary.

        version: the weight version that was synced. score: waits for the trainer's log-probabilities of the canary's
        batch and returns them, fp32 [1, S].
        """
        scored = asyncio.create_task(asyncio.to_thread(score))
        # A canary task raises its error. If a run ends and no such task is left, asyncio would print a traceback.
        scored.add_done_callback(lambda task: task.cancelled() or task.exception())
        for slot in self.slots:
            if slot.endpoint in endpoints:
                slot.canary_task = asyncio.create_task(slot.run_canary(canary, version, scored, self._differences))

    @waited
    async def canaries(self) -> dict[str, float]:
        """Return `sync/canary_diff`, the largest finite difference of the canaries answered since the last call."""
        finite = [each for each in self._differences if each < math.inf]
        self._differences.clear()
        return {"sync/canary_diff": max(finite)} if finite else {}

    @waited
    async def held(self) -> list[dict[str, str]]:
        """Return the tensor digests of each engine that gets groups. One that does not answer is given up."""
        found = await asyncio.gather(*(slot.answer(Engine.manifest) for slot in self.slots if slot.serving))
        return [each for each in found if each is not None]

    @waited
    async def any_lost(self, endpoints: Sequence[Endpoint]) -> bool:
        """Return whether one of these engines is gone or does not answer; such an engine is given up."""
        asked = [slot for slot in self.slots if slot.endpoint in endpoints]
        pulses = [asyncio.create_task(slot.answer(Engine.pulse)) for slot in asked]
        for pulse in asyncio.as_completed(pulses):  # the first lost one suffices: others may answer late
            if await pulse is None:
                break
        await end(*pulses)
        return not {slot.endpoint for slot in self.slots}.issuperset(endpoints)

    @begun
    async def admit(self, group: Group, sampling: SamplingParams, oldest: int, near: object = None) -> list[Trajectory]:
        """Have a group answered by the engine with the least to do. If that engine is lost, another one answers.

        near: groups with the same `near` go to the same engine, as long as it is there and has room.

        The future raises StaleWeightsError for a token of weights before `oldest`, or after the version of `expect`.
        """
        longest = len(group.prompt.token_ids) + sampling.max_new_tokens
        slot, answers = await self._request(
            len(group.seeds), longest, lambda actor: call(actor, Engine.generate, [group], sampling), near
        )
        slot.tokens += sum(len(answer.token_ids) for answer in answers)
        check_versions(answers, oldest, self._newest)
        return answers

    @begun
    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Have the engine with the least to do score sequences; see `EngineClient.score`."""
        longest = max(map(len, sequences))
        _, scores = await self._request(len(sequences), longest, lambda actor: call(actor, Engine.score, sequences))
        return scores

    @waited
    async def sleep(self) -> list[Slept]:
        """Have every engine release its memory, and start none until `wake`; return what each has released.

        Engines get no groups until a sync has woken them. Engines that are starting are waited for. An engine that does
        not answer counts as lost, and is replaced once the others wake.
        """
        self._awake.clear()
        for slot in self.slots:
            slot.serving = False
        while any(slot.starts for slot in self.slots):
            await self._change.wait()

        async def slept(slot: EngineSlot) -> Slept | None:
            actor, found = slot.actor, await slot.answer(Engine.sleep)
            if found is None:
                await end_engine(actor, self._name)  # before another takes its memory
            return found

        every = await asyncio.gather(*(slept(slot) for slot in self.slots if slot.endpoint))
        return [each for each in every if each is not None]

    @waited
    async def wake(self) -> None:
        """Let engines start again in place of lost ones. Sleeping engines are woken by a sync."""
        self._awake.set()

    @waited
    async def switch(self, serving: Serving) -> None:
        """Replace all engines by engines with `serving`, which answer the groups under way. Call `wait` afterwards."""
        self._serving, self._newest = serving, serving.version
        for slot in self.slots:
            slot.lose("")

    @waited
    async def metrics(self) -> dict[str, float]:
        """Return `perf/engine_...` since the last call; nothing without engines."""
        now = time.monotonic()
        idle = [slot.idle + (0.0 if slot.answers else now - slot.idle_since) for slot in self.slots]
        tokens = [slot.tokens for slot in self.slots]
        if not idle:
            return {}
        for slot in self.slots:
            slot.idle, slot.tokens, slot.idle_since = 0.0, 0, now
        balance = {"perf/engine_balance": min(tokens) / max(tokens)} if len(tokens) > 1 and max(tokens) else {}
        return {"perf/engine_idle_seconds": sum(idle) / len(idle), **balance}

    async def _until(self, look: Callable[[], Result]) -> Result:
        """Return what `look` finds, once it finds something. Raise the error if an engine cannot be replaced."""
        while True:
            if self._failure is not None:
                raise self._failure
            if found := look():
                return found
            await self._change.wait()

    async def _run_slot(self, slot: EngineSlot) -> None:
        """Run the engine of this slot, and one after another in its place. If the first one cannot start, or an error
        comes that another engine cannot repair, all waiting calls raise it, and all slots end."""
        first, failures = True, 0
        try:
            while self._failure is None:
                try:
                    reason = await self._run_one_engine(slot, first)
                    failures = 0
                except (EngineError, NoRoomError, UserError, ray.exceptions.RayError) as error:
                    if first:
                        self._failure = error
                    failures += 1
                    reason = str(error)
                    slot.lose(reason)
                first = False
                if reason and self._failure is None:
                    self._note_loss(slot, reason)
                self._changed()
                await end_engine(slot.actor, self._name)
                slot = self.slots[slot.index] = slot.next()
                await asyncio.sleep(min(2.0**failures, 30.0) if failures else 0.0)
        except Exception as error:
            self._failure = self._failure or error
            self._changed()

    async def _run_one_engine(self, slot: EngineSlot, first: bool) -> str:
        """Run one engine until it has to be replaced. Return why; empty if `switch` has replaced it."""
        serving = self._serving
        actor = slot.actor = await self._make_actor(serving, slot, patient=not first)
        await self._awake.wait()
        slot.starts = True
        try:
            endpoint = await call(actor, Engine.start, serving.checkpoint, serving.version)
        finally:
            slot.starts = False
        if slot.lost.done():
            return slot.lost.result()  # `switch` has replaced all engines meanwhile
        if serving.manifest is not None:
            differing = serving.manifest.differences(await call(actor, Engine.manifest))
            if differing:
                raise EngineError(
                    f"{self._name} {slot.index} does not hold what its checkpoint {serving.checkpoint} holds; check "
                    f"this disk, or give the run another one:\n" + "\n".join(list(differing.values())[:20])
                )
        slot.endpoint, slot.serving = endpoint, serving.manifest is not None
        self._changed()
        while not (await asyncio.wait([slot.lost], timeout=_PULSE_SECONDS))[0]:
            slot.cached = await slot.answer(Engine.pulse) or 0
        return slot.lost.result()

    async def _make_actor(self, serving: Serving, slot: EngineSlot, patient: bool) -> Any:
        """Start the actor of an engine. patient: wait until a node has room, and add one event about it."""
        waits = False
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._maker, serving.make, slot.index)
            except NoRoomError as error:
                if not patient:
                    raise
                if not waits:
                    self._events.add(ENGINES_REPLACED, 0, f"{self._name} {slot.index} waits for a node: {error}")
                waits = True
            await asyncio.sleep(_PULSE_SECONDS)

    def _note_loss(self, slot: EngineSlot, reason: str) -> None:
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
            self._events.add(ENGINES_REPLACED, 1, f"{self._name} {slot.index} is lost and replaced: {first_line}")

    async def _request(
        self, count: int, longest: int, ask: Callable[[Any], Awaitable[Result]], near: object = None
    ) -> tuple[EngineSlot, Result]:
        """Return the slot of the engine that answers a request for `count` sequences, and its answer. If an engine is
        lost or fails its canary, another one is asked.

        longest: most tokens of one of the sequences at its end. near: see `admit`.
        """
        while True:
            slot = await self._choose_slot(count, longest, near)
            try:
                with slot.answering(count):
                    answer = await ask(slot.actor)
                    if await slot.passes_canary():
                        return slot, answer
            except EngineDiedError as died:
                slot.lose(str(died))
            except EngineError:
                if not slot.lost.done():
                    raise
                # else it was ended while it worked
            finally:
                self._changed()

    async def _choose_slot(self, count: int, longest: int, near: object) -> EngineSlot:
        """Return the slot of a serving engine: the engine that `near` went to before; else the engine with the fewest
        answers under way, and among equals the fewest tokens.

        No engine gets more than twice what its KV cache holds. Further requests wait for the first engine with room.
        """
        room = max(2 * self._config.cache_tokens // longest, count)
        free = await self._until(lambda: [slot for slot in self.slots if slot.serving and slot.answers + count <= room])
        if near is not None and (before := self._near.get(near)) in free:
            return before
        chosen = min(free, key=lambda slot: (slot.answers, slot.cached, slot.index))
        if near is not None:
            self._near[near] = chosen
        return chosen

    def _changed(self) -> None:
        """Wake the calls that wait for an engine to be free, up or lost."""
        self._change.set()
        self._change = asyncio.Event()
