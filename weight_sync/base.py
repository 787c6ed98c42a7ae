"""One base for both sides: the quantized weights of a trainer that does not change them, in memory that engines of the
same machine read as well.

The trainer's ranks write it together, once, and from then on nobody does: all of them and every engine map it to be
read. It outlives engines; a new one maps it again. The proof is that of any sync: the engine's digests of its
parameters, wherever they lie, against those of what was written.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from models.base import Base, base_bytes
from numerics.io.shared import Shared, mapped, share
from numerics.ranks import all_gathered, rank, together
from numerics.spec import QuantSpec
from rollout.server.client import EngineClient
from rollout.types import Endpoint
from weight_sync.manifest import Recorder, Sent
from weight_sync.quantized import served_tensors

if TYPE_CHECKING:
    from trainer.scorer import Scorer


class Ranks(Protocol):
    """What a `TrainerGroup` is to this module."""

    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function gives on each rank, with the rank's model first."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A base, as one trainer rank knows it.

    Attributes:
        base: what it reads. memory: on the rank that owns it.
        sent: digests of what the rank has written.
        kept: bytes of the rank's frozen parameters that it still has for itself.
    """

    base: Base
    memory: Shared | None
    sent: Sent
    kept: int


def place_base(model: Scorer, spec: QuantSpec) -> Placed:
    """Write the frozen weights of a trainer, quantized under `spec`, into memory for all, and have it read them there.
    Every rank calls it, all on one machine. A trainer that has done it is asked for nothing.

    Raises:
        OSError: a rank cannot reach the memory of the first.
    """
    if model.placed is not None:
        return model.placed
    device, size = next(model.model.parameters()).device, base_bytes(model.definition, spec)
    memory = share("base", size, device) if rank() == 0 else None
    address = all_gathered("" if memory is None else memory.address())[0]
    recorder = Recorder(model.definition.tensors)

    def write() -> None:
        base = Base(mapped(address, writable=True), model.definition, spec)
        weights = served_tensors(model.weights.share(model.model), spec, model.definition)
        for name, tensor in recorder.watch((name, tensor) for name, tensor in weights if name in base.tensors):
            base.tensors[name].copy_(tensor)

    together(write)
    together(lambda: None if memory is None else memory.seal())
    base = Base(mapped(address), model.definition, spec)
    model.placed = Placed(base, memory, recorder.sent(0), model.adopt(base))
    return model.placed


def give_base(trainer: Ranks, spec: QuantSpec, endpoints: Sequence[Endpoint], patience_s: float) -> list[Sent]:
    """Have engines read the base of a trainer, which places it if it has not; `commit` follows. What each rank has
    written of it.

    Raises:
        EngineError: an engine cannot, and has to be replaced.
    """
    sent = trainer.apply(_written, spec)
    addresses = next(each for each in trainer.apply(_addresses, len(endpoints)) if each)

    async def read(endpoint: Endpoint, address: str) -> None:
        async with EngineClient(endpoint, timeout_s=patience_s) as engine:
            await engine.map_base(address)

    async def all_of_them() -> None:
        await asyncio.gather(*(read(endpoint, to) for endpoint, to in zip(endpoints, addresses, strict=True)))

    asyncio.run(all_of_them())
    return sent


def changed_in_base(model: Scorer) -> list[str]:
    """The tensors of a rank's base that are not what was written: digested now, named. None of them on any rank says
    that the base is what it was."""
    assert model.placed is not None, "there is no base"
    now, then = model.placed.base.digests(), all_gathered(model.placed.sent.digests)
    written = {name: digest for part in then for name, digest in part.items()}
    return sorted(name for name, digest in written.items() if now[name] != digest)


def reads(model: Scorer, spec: QuantSpec) -> bool:
    """Whether a base under `spec` can be this trainer's: it has none yet, or that one."""
    return model.placed is None or model.placed.base.spec == spec


def _written(model: Scorer, spec: QuantSpec) -> Sent:
    return place_base(model, spec).sent


def _addresses(model: Scorer, count: int) -> list[str]:
    """One for each engine, by the rank that owns the memory."""
    memory = model.placed.memory if model.placed is not None else None
    return [] if memory is None else [memory.address() for _ in range(count)]
