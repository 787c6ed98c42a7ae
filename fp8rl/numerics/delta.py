"""Computes deltas between two tensors of the same shape: positions and new values of the bytes that differ."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

_LONGEST_GAP = 0xFFFF
_ENTRY_BYTES = 3
"""Bytes of an entry of a delta: two for the distance to the previous entry, one for the value."""


@dataclasses.dataclass
class LastSent:
    """A copy of the tensors that a process has sent, by name, from one sync to the next."""

    version: int | None = None
    """The weight version that was sent; None while the copy is incomplete."""
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    frozen: dict[str, str] = dataclasses.field(default_factory=dict)
    """Digests of the parameters that are not trained, by name, when they were first sent."""


def encode(new: Tensor, old: Tensor) -> Tensor | None:
    """Return the delta uint8 [3 n] that makes `old` into `new`; None if it would be no shorter than `new` itself.

    n counts the bytes that differ and every 65,535th byte, so that a distance between entries fits into two bytes.
    """
    values = as_bytes(new)
    changed = values != as_bytes(old)
    changed[::_LONGEST_GAP] = True
    if _ENTRY_BYTES * int(changed.sum()) >= len(values):
        return None
    places = changed.nonzero().flatten()
    gaps = places.diff(prepend=places[:1])
    return torch.cat([(gaps & 0xFF).to(torch.uint8), (gaps >> 8).to(torch.uint8), values[places]])


def apply(delta: Tensor, held: Tensor) -> None:
    """Apply a delta of :func:`encode` in place to `held`, a contiguous tensor on any device. Raises ValueError if the
    delta belongs to a longer tensor."""
    low, high, values = delta.view(_ENTRY_BYTES, -1)
    places = (low.long() | high.long() << 8).cumsum(0)
    target = as_bytes(held)
    if len(places) and int(places[-1]) >= len(target):
        raise ValueError(f"found a delta that changes byte {int(places[-1])}, expected bytes 0 to {len(target) - 1}")
    target[places.to(held.device)] = values.to(held.device)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as uint8 [bytes]."""
    return tensor.detach().view(-1).view(torch.uint8)
