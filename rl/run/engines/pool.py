"""The engines of a run, as one: groups spread over those that serve, and another in place of one that is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from fp8rl.rl.run.background import Background
from fp8rl.rl.run.engines.canary import Expected
from fp8rl.rl.run.engines.fleet import Fleet, News
from fp8rl.rl.run.engines.serving import Serving
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine import Slept
from fp8rl.rollout.server.client import EngineClient
from fp8rl.rollout.types import Endpoint, Group, SamplingParams, Trajectory

Result = TypeVar("Result")

_END_SECONDS = 30.0
"""Bound of the end of all engines; each is told to, and killed a few seconds later."""


class EnginePool:
    """A fleet of engines in a thread of its own, which watches and replaces them also while the trainer trains.

    A new engine gets no group before a sync: the owner of the trainer's weights asks `up` whom to send them, and says
    `verified`. One whose weights never change has its digests compared with those of its files instead
    (`Serving.manifest`). Nothing but that thread writes what the fleet counts.

    Raises:
        EngineError: from any method that waits, when more engines were lost within an hour than the spec allows.
    """

    def __init__(self, count: int, serving: Serving, config: RolloutSection, awake: bool = True) -> None:
        """Begin to start `count` engines; `wait` for them. awake: now, not only when they are to `wake`."""
        self._count = count
        self.fleet = Fleet(serving, config)
        self._background = Background("engines")
        self._run(self.fleet.open(count, awake))

    @classmethod
    def none(cls) -> EnginePool:
        """No engines: of a run that samples nothing."""
        return cls(0, Serving(lambda index: None, Path()), RolloutSection())

    def __len__(self) -> int:
        return self._count

    def wait(self) -> None:
        """Until every engine answers and has passed the handshake. Raises what went wrong at the first start."""
        self._run(self.fleet.all_up())

    def up(self) -> list[Endpoint]:
        """Every engine that can be sent weights; waits until there is one."""
        return self._run(self.fleet.up())

    def waiting(self) -> list[Endpoint]:
        """Engines that are up and get no groups until a sync has verified their weights."""
        return self._run(self.fleet.waiting())

    def expect(self, version: int) -> None:
        """Expect that answers from now on may come from weights up to `version`."""
        self._run(self.fleet.expect(version))

    def verified(self, endpoints: Sequence[Endpoint]) -> None:
        """A sync found these engines to hold the trainer's weights: they get groups."""
        self._run(self.fleet.verified(endpoints))

    def prove(self, endpoints: Sequence[Endpoint], expected: Expected) -> None:
        """Have these engines answer a canary, which no answer of theirs may overtake."""
        self._run(self.fleet.prove(endpoints, expected))

    def canaries(self) -> dict[str, float]:
        """`sync/canary_diff` of those that were answered since this was last asked."""
        return self._run(self.fleet.canaries())

    def any_lost(self, endpoints: Sequence[Endpoint]) -> bool:
        """Whether one of these engines is gone. Looks for a while before it says no."""
        return self._run(self.fleet.any_lost(endpoints))

    def admit(
        self, group: Group, sampling: SamplingParams, oldest: int, near: object = None
    ) -> Future[list[Trajectory]]:
        """Have a group answered, by the engine with the least to do. An engine's loss is not noticed in the answer.

        near: groups with the same one go to the same engine, as long as it is there and has room.

        Raises StaleWeightsError, in time, for a token of weights before `oldest` or after those of `expect`.
        """
        return self._background.begin(self.fleet.answer(group, sampling, oldest, near))

    def score(self, sequences: list[list[int]]) -> Future[list[list[float]]]:
        """Have sequences scored, see `EngineClient.score`, by the engine with the least to do."""
        return self._background.begin(self.fleet.score(sequences))

    def sleep(self) -> list[Slept]:
        """Have every engine give up its memory, and start none until `wake`; what each has given up. They get no groups
        until a sync has woken them."""
        return self._run(self.fleet.sleep())

    def wake(self) -> None:
        """Let engines start again in place of those that are lost. The others wake by a sync."""
        self._run(self.fleet.wake())

    def switch(self, serving: Serving) -> None:
        """Replace all engines by others; groups under way are answered by these."""
        self._run(self.fleet.switch(serving))

    def figures(self) -> dict[str, float]:
        """`perf/engine_...` since this was last asked; nothing without engines."""
        return self._run(self.fleet.figures())

    def news(self) -> list[News]:
        """What has happened to engines since this was last asked."""
        return self._run(self.fleet.news())

    def ask(self, use: Callable[[EngineClient], Awaitable[Result]]) -> Result:
        """What `use` gets from the first engine."""

        async def asked() -> Result:
            async with EngineClient(self.up()[0]) as client:
                return await use(client)

        return asyncio.run(asked())

    def stop(self) -> None:
        """End all servers and their actors; a second call does nothing."""
        if self._background.closed:
            return
        try:
            self._background.run(self.fleet.close(), _END_SECONDS)
        except TimeoutError:
            logging.getLogger(__name__).warning("found no end of the engines within %g s: killing them", _END_SECONDS)
            self.fleet.kill()
        self._background.close()

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._background.run(coroutine)
