"""The engines of a run, in one event loop: who gets which group, and another engine in place of one that is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import ray
from torch import Tensor

from fp8rl.numerics.errors import UserError
from fp8rl.rl.run.cluster.seats import NoRoomError
from fp8rl.rl.run.engines.canary import Expected, largest
from fp8rl.rl.run.engines.serving import Serving
from fp8rl.rl.run.engines.slot import Slot
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.deadlines import end, within
from fp8rl.rollout.engine import Slept
from fp8rl.rollout.errors import EngineDiedError, EngineError
from fp8rl.rollout.sampler import check_versions
from fp8rl.rollout.server.server import GRACE_S
from fp8rl.rollout.types import Decoding, Endpoint, Group, SamplingParams, Trajectory
from fp8rl.trainer.actor import TrainerDiedError

Result = TypeVar("Result")

_STOP_SECONDS = 6.0
_PULSE_SECONDS = 2.0
"""Between two looks at an engine."""
_WORKING = 0.01
"""The part of a core that a scheduler which computes has at least, on a busy machine; one that waits has none."""
_DYING_SECONDS = 2.0
"""A connection breaks a moment before its process is gone."""
_HOUR = 3600.0


@dataclass(frozen=True)
class News:
    """replaced: engines that are, of which this tells."""

    replaced: int
    text: str


class Fleet:
    """Ray actors that own one server each. Everything but the constructor belongs to one event loop.

    Any engine answers any group, and a group comes back whole whatever happens to the engine that it was given to.
    Engines are watched and replaced. What goes wrong with that ends the fleet, and all who wait hear of it.

    Attributes:
        slots: the places of the engines.

    Raises:
        EngineError: from any method that waits, when more engines were lost within an hour than the spec allows.
    """

    def __init__(self, serving: Serving, config: RolloutSection) -> None:
        self._serving, self._config = serving, config
        self._name = "engine" if serving.role == "policy" else f"{serving.role} engine"
        self._newest = serving.version
        self.slots: list[Slot] = []
        self._losses: deque[float] = deque()
        self._news: list[News] = []
        self._differences: list[float] = []
        self._near: WeakKeyDictionary[object, Slot] = WeakKeyDictionary()
        self._failure: Exception | None = None
        self._maker = ThreadPoolExecutor(1, "engine-maker")

    async def open(self, count: int, awake: bool) -> None:
        """Begin to start so many engines, unless they sleep for now."""
        self._change, self._awake = asyncio.Event(), asyncio.Event()
        if awake:
            self._awake.set()
        loop = asyncio.get_running_loop()
        self.slots = [Slot(index, loop.create_future()) for index in range(count)]
        self._lives = [asyncio.create_task(self._live(slot)) for slot in self.slots]

    async def close(self) -> None:
        """End all servers and their actors."""
        await end(*self._lives)
        self._maker.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(self._end(slot.actor, GRACE_S) for slot in self.slots))

    def kill(self) -> None:
        """Kill all actors, in any thread; a server dies with its actor."""
        for slot in self.slots:
            if slot.actor is not None:
                ray.kill(slot.actor)

    async def all_up(self) -> None:
        """Until every engine answers and has passed the handshake. Raises what went wrong at the first start."""
        while not all(slot.is_up for slot in self.slots):
            self._raise_failure()
            await self._change.wait()

    async def up(self) -> list[Endpoint]:
        """Every engine that can be sent weights; waits until there is one."""
        assert self.slots, "there are no engines"
        while True:
            self._raise_failure()
            if there := [slot.endpoint for slot in self.slots if slot.endpoint and slot.is_up]:
                return there
            await self._change.wait()

    async def waiting(self) -> list[Endpoint]:
        """Engines that are up and get no groups until a sync has verified their weights."""
        return [slot.endpoint for slot in self.slots if slot.endpoint and slot.is_up and not slot.serving]

    async def expect(self, version: int) -> None:
        """Expect that answers from now on may come from weights up to `version`."""
        self._newest = version

    async def verified(self, endpoints: Sequence[Endpoint]) -> None:
        """These engines hold the trainer's weights: they get groups."""
        for slot in self.slots:
            slot.serving = slot.serving or (slot.endpoint in endpoints and slot.is_up)
        self._changed()

    async def prove(self, endpoints: Sequence[Endpoint], expected: Expected) -> None:
        """Have these engines, which a sync has just verified, answer a canary; no answer of theirs counts before."""
        scored = asyncio.create_task(asyncio.to_thread(expected.scored))
        for slot in self.slots:
            if slot.endpoint in endpoints and slot.is_up:
                slot.proof = asyncio.create_task(self._prove(slot, expected, scored))

    async def canaries(self) -> dict[str, float]:
        """`sync/canary_diff` of the canaries that were answered since this was last asked."""
        differences, self._differences = self._differences, []
        return largest(differences)

    async def any_lost(self, endpoints: Sequence[Endpoint]) -> bool:
        """Whether one of these engines is gone. Looks for a while before it says no."""
        deadline = time.monotonic() + _DYING_SECONDS
        while time.monotonic() < deadline:
            held = {slot.endpoint: slot for slot in self.slots if slot.is_up}
            for endpoint in endpoints:
                slot = held.get(endpoint)
                if slot is None or slot.endpoint != endpoint or (actor := slot.actor) is None:
                    return True  # while another answered, this one was lost
                try:
                    alive = (await _call(actor.health.remote())).alive
                except EngineDiedError:
                    alive = False
                if not alive:
                    slot.lose(actor, "its process is gone")
                    return True
            await asyncio.sleep(0.1)
        return False

    async def answer(
        self, group: Group, sampling: SamplingParams, oldest: int, near: object = None
    ) -> list[Trajectory]:
        """The answers to a group; see `EnginePool.admit`."""
        longest = len(group.prompt.token_ids) + sampling.max_new_tokens
        answers: list[Trajectory]
        slot, answers = await self._asked(
            len(group.seeds), longest, lambda actor: actor.generate.remote([group], sampling), near
        )
        slot.tokens += sum(len(answer.token_ids) for answer in answers)
        slot.decoding = sum((answer.decoding for answer in answers), slot.decoding)
        check_versions(answers, oldest, self._newest)
        return answers

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See `EngineClient.score`."""
        longest = max(map(len, sequences))
        scores: list[list[float]]
        _, scores = await self._asked(len(sequences), longest, lambda actor: actor.score.remote(sequences))
        return scores

    async def sleep(self) -> list[Slept]:
        """Have every engine give up its memory, and start none until `wake`; what each has given up.

        They get no groups until a sync has woken them. Those that are on their way up are waited for. One that does not
        answer is lost, and replaced once the others wake.
        """
        self._awake.clear()
        for slot in self.slots:
            slot.serving = False
        while any(slot.starts for slot in self.slots):
            await self._change.wait()
        there = [slot for slot in self.slots if slot.is_up]
        slept = await asyncio.gather(*map(self._put_to_sleep, there))
        return [each for each in slept if each is not None]

    async def wake(self) -> None:
        """Let engines start again in place of those that are lost. The others wake by a sync."""
        self._awake.set()

    async def switch(self, serving: Serving) -> None:
        """Replace all engines by others; groups under way are answered by these."""
        self._serving, self._newest = serving, serving.version
        for slot in self.slots:
            slot.endpoint = None
            slot.lose(slot.actor, "")
        await self.all_up()

    async def figures(self) -> dict[str, float]:
        """`perf/engine_...`, and of engines that draft how many tokens a forward pass brought, since this was last
        asked; nothing without engines."""
        now = time.monotonic()
        idle = [slot.idle + (0.0 if slot.answers else now - slot.idle_since) for slot in self.slots]
        tokens = [slot.tokens for slot in self.slots]
        if not idle:
            return {}
        decoding = sum((slot.decoding for slot in self.slots), Decoding())
        for slot in self.slots:
            slot.idle, slot.tokens, slot.decoding, slot.idle_since = 0.0, 0, Decoding(), now
        balance = {"perf/engine_balance": min(tokens) / max(tokens)} if len(tokens) > 1 and max(tokens) else {}
        return {"perf/engine_idle_seconds": sum(idle) / len(idle), **balance, **decoding_metrics(decoding)}

    async def news(self) -> list[News]:
        """What has happened to engines since this was last asked."""
        news, self._news = self._news, []
        return news

    async def _live(self, slot: Slot) -> None:
        """Keep an engine in a slot. Whatever cannot be mended is raised by all who wait."""
        try:
            await self._follow(slot)
        except Exception as error:
            self._failure = self._failure or error
            self._changed()

    async def _follow(self, slot: Slot) -> None:
        """One engine after another. An error of the first start ends the fleet."""
        failures = 0
        while self._failure is None:
            first = slot.engines == 0
            try:
                reason = await self._life(slot, first)
                failures = 0
            except (EngineError, NoRoomError, UserError, ray.exceptions.RayError) as error:
                if first:
                    self._failure = error
                failures += 1
                reason = str(error)
            slot.engines += 1
            actor, slot.actor = slot.actor, None  # what it still answers is of an engine that is gone
            slot.endpoint, slot.serving, slot.load = None, False, None
            slot.lost, slot.proof = asyncio.get_running_loop().create_future(), None
            if reason and self._failure is None:
                self._note_loss(slot, reason)
            self._changed()
            await self._end(actor)
            await asyncio.sleep(min(2.0**failures, 30.0) if failures else 0.0)

    async def _life(self, slot: Slot, first: bool) -> str:
        """One engine from its start to where it has to be replaced; why, empty if that is nobody's fault."""
        serving = self._serving
        actor = slot.actor = await self._made(serving, slot, patient=not first)
        await self._awake.wait()
        slot.starts = True
        try:
            endpoint = await _call(actor.start.remote(serving.checkpoint, serving.version))
        finally:
            slot.starts = False
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
                slot.load = await self._answered(actor, _call(actor.pulse.remote()))
            except TimeoutError as error:
                return f"it has not answered for {error}, though its process is there"
            except EngineError as error:
                return str(error)

    async def _prove(self, slot: Slot, expected: Expected, scored: asyncio.Task[Tensor]) -> None:
        """Compare one engine's canary with the trainer's, and condemn the engine if it says so."""
        actor, canary = slot.actor, expected.canary
        try:
            (answer,) = await _call(actor.generate.remote([canary.group], canary.sampling))
            difference = canary.difference(answer, await asyncio.shield(scored))
        except TrainerDiedError:
            return  # whoever trains on the answers meets it too
        except EngineError as error:
            slot.condemn(actor, str(error))
            return
        if set(answer.weight_versions) != {expected.version}:
            return  # another sync has come between, with a canary of its own
        self._differences.append(difference)
        if fault := expected.fault(difference):
            slot.condemn(actor, fault)

    async def _put_to_sleep(self, slot: Slot) -> Slept | None:
        actor = slot.actor
        try:
            slept: Slept = await self._answered(actor, _call(actor.sleep.remote()))
            return slept
        except TimeoutError as error:
            slot.lose(actor, f"it has not gone to sleep within {error}")
        except EngineError as error:
            slot.lose(actor, str(error))
        await self._end(actor)  # before another takes its memory
        return None

    async def _answered(self, actor: Any, call: Coroutine[Any, Any, Result]) -> Result:
        """Return what an engine answers. One that computes is waited for: its schedulers hear nothing meanwhile.

        Raises TimeoutError, which says for how long nothing came: in the second half of `hung_after_s`, or later, the
            schedulers have not worked; or it took longer than the longest pass, as where they wait for a GPU in a loop.
        """
        config, half = self._config, self._config.hung_after_s / 2

        async def worked() -> float:
            seconds: float = await within(half, _call(actor.cpu_seconds.remote()))
            return seconds

        answer = asyncio.ensure_future(call)
        began = time.monotonic()
        try:
            await asyncio.wait({answer}, timeout=half)
            while not answer.done():
                before = await worked()
                await asyncio.wait({answer}, timeout=half)
                if not answer.done() and await worked() - before < _WORKING * half:
                    raise TimeoutError
                if time.monotonic() - began > config.longest_pass_s:
                    raise TimeoutError
            return answer.result()
        except TimeoutError:
            raise TimeoutError(f"{time.monotonic() - began:.0f} s (rollout.hung_after_s)") from None
        finally:
            await end(answer)

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

    async def _end(self, actor: Any, grace_s: float = 0.0) -> None:
        """End an engine whatever state it is in. A process that is stopped would not notice that its owner died."""
        if actor is None:
            return
        try:
            await within(_STOP_SECONDS, _call(actor.stop.remote(grace_s)))
        except Exception as error:  # a server that is still there dies with its actor
            logging.getLogger(__name__).debug("%s that is to end: %r", self._name, error)
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

    async def _asked(
        self, count: int, longest: int, ask: Callable[[Any], Any], near: object = None
    ) -> tuple[Slot, Any]:
        """What an engine answers to a request for `count` sequences, and which one: another if the first is lost, or
        its canary no good.

        longest: tokens that one of them may have in the end. near: see `admit`.
        """
        while True:
            slot = await self._chosen(count, longest, near)
            actor = slot.actor
            slot.give(count)
            try:
                answer = await _call(ask(actor))
                if await slot.is_sound(actor):
                    return slot, answer
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
        room = max(2 * self._config.cache_tokens // longest, count)
        while True:
            self._raise_failure()
            free = [slot for slot in self.slots if slot.serving and slot.answers + count <= room]
            if near is not None and (before := self._near.get(near)) in free:
                return before
            if free:
                slot = min(free, key=lambda slot: (slot.answers, slot.load.tokens if slot.load else 0, slot.index))
                if near is not None:
                    self._near[near] = slot
                return slot
            await self._change.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _changed(self) -> None:
        """Wake whoever waits for an engine to be free, up or lost."""
        self._change.set()
        self._change = asyncio.Event()


def decoding_metrics(decoding: Decoding) -> dict[str, float]:
    """`perf/..._per_forward`; nothing where no engine said that it drafts."""
    if not decoding.passes:
        return {}
    return {
        "perf/accepted_per_forward": 1 + decoding.accepted / decoding.passes,
        "perf/drafted_per_forward": decoding.drafted / decoding.passes,
    }


async def _call(reference: Any) -> Any:
    """What an actor answers; its exception comes out as what it was, an error of Ray's own as EngineDiedError: whether
    the actor has ended, or Ray's memory monitor has ended it, its engine is no good any more."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise EngineDiedError(f"the actor of the engine is gone: {error}") from error
