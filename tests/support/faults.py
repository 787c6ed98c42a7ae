"""Transports that lose or damage tensors on the way, after the trainer has taken its digests."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.weight_sync.bridge import Transport

Named = tuple[str, Tensor]

MATRIX = "model.layers.0.self_attn.k_proj.weight"
EXPERT = "model.layers.1.mlp.experts.5."
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


@dataclass(frozen=True)
class Tampered:
    """`transport`, with `fault` between the trainer's stream of tensors and it."""

    takes_stacks = False
    transport: Transport
    fault: Callable[[Iterable[Named]], Iterator[Named]]

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.transport.allocate(shape, dtype, device)

    async def send(self, tensors: Iterable[Named], engines: Sequence[EngineClient]) -> None:
        await self.transport.send(self.fault(tensors), engines)


def flipped_bit(tensors: Iterable[Named]) -> Iterator[Named]:
    """The lowest bit of one FP8 code of MATRIX."""
    for name, tensor in tensors:
        if name == MATRIX:
            tensor = tensor.clone()
            tensor.view(torch.uint8)[17, 33] ^= 1
        yield name, tensor


def missed_expert(tensors: Iterable[Named]) -> Iterator[Named]:
    """Nothing of EXPERT is sent: the engine keeps what it had."""
    return ((name, tensor) for name, tensor in tensors if not name.startswith(EXPERT))


def missed_bias(tensors: Iterable[Named]) -> Iterator[Named]:
    """BIAS is not sent: the engine keeps what it had."""
    return ((name, tensor) for name, tensor in tensors if name != BIAS)


def broken_transport(tensors: Iterable[Named]) -> Iterator[Named]:
    """Half of a rank's tensors, several buckets, and then an error."""
    for index, item in enumerate(tensors):
        if index == 20:
            raise OSError("the cable was pulled")
        yield item
