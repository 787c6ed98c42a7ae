"""Dispatches each op to one of two implementations: a pure-torch definition, which is also the oracle, or a kernel.

An op is a function marked with `op`. Calling it calls its definition or, once kernels are installed in the process, its
kernel, which has the definition's name and signature. A process chooses once, at its start, by its device and the run's
spec (`numerics.backend.implementation`). Kernels of our ops are in `numerics.kernels`. The constant PROBES of a file of
ops says how the start-up probe tries them (`numerics.probe`). A user's family of ops registers its kernels
(`register_kernel`), and appends its probes to USERS_PROBES.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Kernels = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class AttentionProbe:
    """A trial of attention ops, with one tensor as keys and values. There is an op for each layout of keys."""

    name: str
    queries: tuple[int, ...]
    """Shape of a token's queries in a trial."""
    keys: tuple[int, ...]
    """Shape of a token's keys and values."""
    whole: Callable[..., Any]
    """The op over keys [B, T, ...], like `numerics.ops.attention`."""
    packed: Callable[..., Any]
    """The op over rows end to end, like `numerics.ops.packed_attention`."""
    paged: Callable[..., Any]
    """The op over the slots of a cache, like `numerics.ops.paged_attention`."""
    tree: Callable[..., Any] | None = None
    """The op over the paths of a prefix tree, like `numerics.ops.tree_attention`; None: there is no such op."""
    values: int = 0
    """How many leading numbers of a key are its value. The ops get this number in place of values. 0: the ops get
    values."""

    def attend(self, op: Callable[..., Any], queries: Any, keys: Any, *where: Any) -> Any:
        """Call one of these ops with queries and keys. where: the op's arguments about tokens and positions."""
        if self.values:
            return op(queries, keys, *where, self.values, 0.1)
        return op(queries, keys, keys, *where, 0.1)


@dataclass(frozen=True)
class Probes:
    """Trials of ops that only some models have."""

    rows: Callable[[Callable[..., Any], int], Mapping[str, Callable[[int], Any]]]
    """A function of `random` (which draws BF16 numbers of a shape) and a number of rows. For each op, by name, it
    returns a function of n that computes the op for the first n rows."""
    attention: AttentionProbe | None = None


OPS: dict[str, Callable[..., Any]] = {}
"""The definitions of ops by name, once their modules are imported."""
_kernels: Kernels | None = None
_registered: dict[str, Callable[..., Any]] = {}
USERS_PROBES: list[Probes] = []
"""Trials of a user's ops by the start-up probe of this process."""


def op(definition: Callable[P, R]) -> Callable[P, R]:
    """Mark the definition of an op."""
    name = definition.__name__
    OPS[name] = definition

    @functools.wraps(definition)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _kernels is None:
            return definition(*args, **kwargs)
        kernel = _kernels.get(name) or _registered.get(name)
        if kernel is None:
            raise NotImplementedError(
                f"numerics: found no kernel for the op {name}, expected one for every op where kernels run, since its "
                "torch definition may give other bits than the other side. Write the kernel, or use a CPU"
            )
        return kernel(*args, **kwargs)  # type: ignore[no-any-return]

    return call


def composed(definition: Callable[P, R]) -> Callable[P, R]:
    """Mark the definition of an op that only calls other ops. It runs also where kernels run."""
    register_kernel(definition)
    return op(definition)


def register_kernel(kernel: Callable[..., Any]) -> None:
    """Make a kernel from outside of `numerics.kernels` known in this process, by its op's name."""
    _registered[kernel.__name__] = kernel


def install(kernels: Kernels | None) -> None:
    """Let all ops of this process run these kernels; None: their definitions."""
    global _kernels
    _kernels = kernels


def installed() -> Kernels | None:
    """Return the kernels that `install` was last given."""
    return _kernels
