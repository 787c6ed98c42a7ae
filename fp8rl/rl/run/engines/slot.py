"""One engine of a run, from its start to its loss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from torch import Tensor

from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.deadlines import end, within
from fp8rl.rollout.engine.engine import Engine, call
from fp8rl.rollout.types import Endpoint, EngineError
from fp8rl.trainer.actor import TrainerDiedError

Result = TypeVar("Result")

_STOP_SECONDS = 6.0
_WORKING = 0.01
"""Least part of a core that a computing scheduler uses, even on a busy machine. A waiting scheduler uses none."""


@dataclass
class EngineSlot:
    """The state of one engine. Another slot replaces it after its loss. Only the event loop of `Engines` writes it."""

    index: int
    config: RolloutSection
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Gets the reason, once the engine has to be replaced."""
    actor: Any = None
    endpoint: Endpoint | None = None
    """The engine's endpoint while it can be sent weights: it has passed the handshake, and is not lost."""
    serving: bool = False
    """A sync has verified the engine's weights, so that the engine gets groups."""
    starts: bool = False
    """An engine is starting."""
    answers: int = 0
    """Answers under way."""
    cached: int = 0
    """Tokens in the engine's KV cache at the last health check."""
    tokens: int = 0
    """Tokens that this engine and those before it have generated since the last metrics."""
    idle: float = 0.0
    """Seconds since the last metrics in which there was nothing to do."""
    idle_since: float = field(default_factory=time.monotonic)
    """Monotonic time of the engine's last answer, in seconds."""
    canary_task: asyncio.Task[None] | None = None
    """The canary check after the last sync, running or done."""

    @contextmanager
    def answering(self, answers: int) -> Iterator[None]:
        """Count this number of answers as under way, in addition to others, while the block lasts."""
        if not self.answers:
            self.idle += time.monotonic() - self.idle_since
        self.answers += answers
        try:
            yield
        finally:
            self.answers -= answers
            if not self.answers:
                self.idle_since = time.monotonic()

    def lose(self, reason: str) -> None:
        """Give up the engine. A second call does nothing."""
        if not self.lost.done():
            self.endpoint, self.serving = None, False
            self.lost.set_result(reason)

    def next(self) -> EngineSlot:
        """Return the slot of the engine that replaces this one, with what the metrics of the step have counted."""
        return EngineSlot(self.index, self.config, tokens=self.tokens, idle=self.idle, idle_since=self.idle_since)

    async def passes_canary(self) -> bool:
        """Wait for the canary of the last sync. Return whether the engine's answers may be used: it is not given up."""
        done: asyncio.Task[None] | None = None
        while self.canary_task is not done and self.canary_task is not None:
            done = self.canary_task
            await asyncio.shield(done)
        return not self.lost.done()

    async def run_canary(
        self, canary: Canary, version: int, scored: asyncio.Task[Tensor], differences: list[float]
    ) -> None:
        """Score the canary on this engine and on the trainer, note the difference, and give up the engine if the
        difference is too large. version: the weights that were synced."""
        try:
            (answer,) = await call(self.actor, Engine.generate, [canary.group], canary.sampling)
            difference = canary.difference(answer, await asyncio.shield(scored))
        except TrainerDiedError:
            return  # whoever trains on the answers meets it too
        except EngineError as error:
            fault = str(error) or repr(error)
        else:
            if set(answer.weight_versions) != {version}:
                return  # another sync has come between, with a canary of its own
            differences.append(difference)
            fault = canary.fault(difference, version)
        if fault:
            self.lose(fault)

    async def answer(self, verb: Callable[[Engine], Coroutine[Any, Any, Result]]) -> Result | None:
        """Return the engine's answer to a call of this method. Give up the engine, and return None, if it is gone or
        does not answer.

        While its schedulers compute they read no requests, and the wait goes on. It ends if they did not work for
        `hung_after_s` / 2, after a first wait of that length. It ends after `longest_pass_s` in any case, because a
        scheduler that waits for a GPU in a loop seems to compute.
        """
        actor, half, began = self.actor, self.config.hung_after_s / 2, time.monotonic()
        answer = asyncio.ensure_future(call(actor, verb))
        try:
            await asyncio.wait({answer}, timeout=half)
            while not answer.done():
                before = await within(half, call(actor, Engine.cpu_seconds))
                await asyncio.wait({answer}, timeout=half)
                if not answer.done() and await within(half, call(actor, Engine.cpu_seconds)) - before < _WORKING * half:
                    raise TimeoutError
                if time.monotonic() - began > self.config.longest_pass_s:
                    raise TimeoutError
            return answer.result()
        except TimeoutError:
            seconds = f"{time.monotonic() - began:.0f} s (rollout.hung_after_s)"
            self.lose(f"it has not answered for {seconds}, though its process is there")
        except EngineError as error:
            self.lose(str(error))
        finally:
            await end(answer)
        return None


async def end_engine(actor: Any, name: str, grace_s: float = 0.0) -> None:
    """End an engine in any state, at last by a kill: a stopped process would not notice the end of its owner."""
    if actor is None:
        return
    try:
        await within(_STOP_SECONDS, call(actor, Engine.stop, grace_s))
    except Exception as error:  # a server that is still there dies with its actor
        logging.getLogger(__name__).debug("%s that is to end: %r", name, error)
    ray.kill(actor)
