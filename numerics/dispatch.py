"""Which implementation the ops of this process run on: their pure-torch definitions, or the Triton kernels.

A process chooses once, at its start, by its device and the run's spec (`choose`). An op is a function marked with
`op`: calling it calls what was chosen, and its body stays the definition and the oracle of the kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from numerics.spec import QuantSpec

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Literal["torch", "triton"]

FEWEST_CAPABILITY = (8, 9)
"""Compute capability from which a GPU converts to FP8."""
_SMALL_CAPABILITY = (12, 0)
"""From which GPUs have less shared memory again (99 KiB) than a product's tile takes."""
_GROUP = 128
# Weights in blocks alone: the gradient of the input sums over their rows, where the scales of groups change at each.
_GRANULARITY = {"weight": "block", "activation": "token_group", "gradient": "token_group"}

_kernels: Mapping[str, Callable[..., Any]] = {}


def op(definition: Callable[P, R]) -> Callable[P, R]:
    """Marks the definition of an op. Kernels go by the definition's name and have its signature."""
    name = definition.__name__

    @functools.wraps(definition)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return _kernels.get(name, definition)(*args, **kwargs)

    return call


def definition_of(op: Callable[P, R]) -> Callable[P, R]:
    """The pure-torch body of an op, whatever was chosen."""
    body: Callable[P, R] = vars(op)["__wrapped__"]
    return body


def choose(device: torch.device | str, spec: QuantSpec) -> Implementation:
    """Choose for the rest of this process. Returns what was chosen."""
    implementation = implementation_for(capability_of(device), spec)
    _use(implementation)
    return implementation


def capability_of(device: torch.device | str) -> tuple[int, int] | None:
    """Compute capability of a GPU; None of a CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def implementation_for(capability: tuple[int, int] | None, spec: QuantSpec) -> Implementation:
    """What `choose` takes on a device of this compute capability (None: a CPU): kernels where they know the spec."""
    if capability is None or not FEWEST_CAPABILITY <= capability < _SMALL_CAPABILITY:
        return "torch"
    roles = {name: getattr(spec, name) for name in _GRANULARITY}
    known = all(
        not role.quantized or (role.granularity == _GRANULARITY[name] and role.group == _GROUP)
        for name, role in roles.items()
    )
    return "triton" if known else "torch"


@contextlib.contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Another choice inside the block: for tests and benchmarks that compare the two."""
    global _kernels
    previous = _kernels
    _use(implementation)
    try:
        yield
    finally:
        _kernels = previous


def _use(implementation: Implementation) -> None:
    global _kernels
    if implementation == "torch":
        _kernels = {}
        return
    from numerics.kernels.kernels import KERNELS  # Triton is imported where its kernels run, and nowhere else

    _kernels = KERNELS
