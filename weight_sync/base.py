"""One base for both sides: the quantized weights of a trainer that does not change them, in memory that engines of the
same machine read as well.

The trainer's ranks write it together, once, from the model's files, tensor by tensor. From then on it is read-only: all
ranks and every engine map it. Neither side ever holds the weights beside it: a trainer and an engine that wait for it
have placeholders (`numerics.core.memory`). It outlives engines; a new one maps it again. The proof is that of any
sync: the engine's digests of its parameters, wherever they lie, against those of what was written.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fp8rl.models.base import Base, base_bytes
from fp8rl.models.peft import digest_of_all
from fp8rl.models.stored import starting_weights
from fp8rl.numerics.core.memory import Shared, mapped, share
from fp8rl.numerics.core.process import all_gathered, rank, together
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.server.client import EngineClient
from fp8rl.rollout.types import Endpoint
from fp8rl.weight_sync.manifest import Recorder, Sent
from fp8rl.weight_sync.quantized import served_tensors

if TYPE_CHECKING:
    from fp8rl.trainer.scorer import Scorer


class Ranks(Protocol):
    """The part of a `TrainerGroup` that this module needs."""

    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on each rank, with the rank's model first, and return the results."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A base, as one trainer rank knows it."""

    base: Base
    """The tensors that the rank reads."""
    memory: Shared | None
    """The memory, on the rank that owns it."""
    sent: Sent
    """Digests of the tensors that the rank has written."""
    unquantized: str
    """Digest of all weights as the files have them; see `models.peft.base_digest`."""
    kept: int
    """Bytes of the rank's frozen parameters that it still has for itself."""


def place_base(model: Scorer, spec: QuantSpec) -> Placed:
    """Write a trainer's frozen weights, quantized under `spec`, into shared memory, and let the trainer read them
    there.

    Every rank calls it, all on one machine. For a trainer that has done it, nothing happens.

    Raises:
        OSError: a rank cannot reach the memory of the first.
        UserError: the files have values that are not finite.
    """
    if model.placed is not None:
        return model.placed
    definition, device = model.definition, next(model.model.parameters()).device
    memory = share("base", base_bytes(definition, spec), device) if rank() == 0 else None
    addresses = all_gathered("" if memory is None else memory.address())
    in_files, written = Recorder(definition.tensors), Recorder(definition.tensors)

    def write() -> None:
        base = Base(mapped(addresses[0], writable=True), definition, spec)
        weights = starting_weights(model.weights.path, definition, device, rank(), len(addresses))
        served = served_tensors(in_files.watch(weights), spec, definition)
        for name, tensor in written.watch((name, tensor) for name, tensor in served if name in base.tensors):
            base.tensors[name].copy_(tensor)

    together(write)
    together(lambda: None if memory is None else memory.seal())
    base = Base(mapped(addresses[0]), definition, spec)
    unquantized = {name: digest for part in all_gathered(in_files.sent().digests) for name, digest in part.items()}
    model.placed = Placed(base, memory, written.sent(0), digest_of_all(unquantized), model.adopt(base))
    return model.placed


def write_base(trainer: Ranks, spec: QuantSpec) -> list[Sent]:
    """Let all ranks place their base, if they have not; return what each has written of it."""
    return trainer.apply(_written, spec)


def give_base(trainer: Ranks, spec: QuantSpec, endpoints: Sequence[Endpoint], timeout_s: float) -> list[Sent]:
    """Let engines read the base of a trainer, which places it if it has not; `commit` follows.

    Return what each rank has written of it.

    Raises:
        EngineError: an engine cannot, and has to be replaced.
    """
    sent = write_base(trainer, spec)
    addresses = next(each for each in trainer.apply(_addresses, len(endpoints)) if each)

    async def read(endpoint: Endpoint, address: str) -> None:
        async with EngineClient(endpoint, timeout_s=timeout_s) as engine:
            await engine.map_base(address)

    async def all_of_them() -> None:
        await asyncio.gather(*(read(endpoint, to) for endpoint, to in zip(endpoints, addresses, strict=True)))

    asyncio.run(all_of_them())
    return sent


def changed_in_base(model: Scorer) -> list[str]:
    """Digest a rank's base now, and return the tensors that differ from what was written.

    If the list is empty on every rank, the base is what it was.
    """
    assert model.placed is not None, "there is no base"
    now, then = model.placed.base.digests(), all_gathered(model.placed.sent.digests)
    written = {name: digest for part in then for name, digest in part.items()}
    return sorted(name for name, digest in written.items() if now[name] != digest)


def reads(model: Scorer, spec: QuantSpec) -> bool:
    """Return True if the trainer has no base yet, or one under `spec`."""
    return model.placed is None or model.placed.base.spec == spec


def _written(model: Scorer, spec: QuantSpec) -> Sent:
    return place_base(model, spec).sent


def _addresses(model: Scorer, count: int) -> list[str]:
    """One for each engine, by the rank that owns the memory."""
    memory = model.placed.memory if model.placed is not None else None
    return [] if memory is None else [memory.address() for _ in range(count)]
