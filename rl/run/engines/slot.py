"""The place of one engine in the pool."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from fp8rl.rollout.types import Decoding, Endpoint, Load


@dataclass
class Slot:
    """The place of one engine, in which one follows another if it has to.

    endpoint: of the engine that is there now; None until it answers and has passed the handshake. serving: a sync has
    verified what it holds, so that it gets groups. starts: an engine is on its way up. engines: that were here
    before. answers: under way. load: as it last said. tokens: it has generated. decoding: of their answers. idle:
    seconds that it had nothing to do. idle_since: monotonic, of its last answer. proof: what its last sync's canary
    says is on its way, or known. condemned: the last actor here whose canary was no good.
    """

    index: int
    lost: asyncio.Future[str]
    actor: Any = None
    endpoint: Endpoint | None = None
    serving: bool = False
    starts: bool = False
    engines: int = 0
    answers: int = 0
    load: Load | None = None
    tokens: int = 0
    decoding: Decoding = field(default_factory=Decoding)
    idle: float = 0.0
    idle_since: float = field(default_factory=time.monotonic)
    proof: asyncio.Task[None] | None = None
    condemned: Any = None

    @property
    def is_up(self) -> bool:
        """Whether an engine is there that can be sent weights."""
        return self.endpoint is not None and not self.lost.done()

    def give(self, answers: int) -> None:
        """It is asked for so many more."""
        if not self.answers:
            self.idle += time.monotonic() - self.idle_since
        self.answers += answers

    def take(self, answers: int) -> None:
        """So many are not under way any more."""
        self.answers -= answers
        if not self.answers:
            self.idle_since = time.monotonic()

    async def is_sound(self, actor: Any) -> bool:
        """Whether what this actor has answered counts, once the canary of its last sync says it."""
        proven: asyncio.Task[None] | None = None
        while actor is self.actor and self.proof is not proven and self.proof is not None:
            proven = self.proof
            await asyncio.shield(proven)
        return actor is not self.condemned

    def condemn(self, actor: Any, reason: str) -> None:
        """Nothing that this actor has answered since its last sync counts."""
        self.condemned = actor
        self.lose(actor, reason)

    def lose(self, actor: Any, reason: str) -> None:
        """The engine of this actor is no good any more, if it is still this slot's."""
        if actor is self.actor and not self.lost.done():
            self.serving = False
            self.lost.set_result(reason)
