"""Dispatches each op to one of two implementations: a pure-torch definition, which is also the oracle, or a kernel.

An op is a function marked with `op`. Calling it calls its definition or, once kernels are installed in the process, its
kernel, which has the definition's name and signature. A process chooses once, at its start, by its device and the run's
spec (`numerics.backend.implementation`). Kernels of our ops are in `numerics.kernels`. The constant PROBES of a file of
ops says how the start-up probe tries them (`numerics.probe`). A user's family of ops registers its kernels
(`register_kernel`), and appends its probes to USERS_PROBES.

Every call passes here. So a watcher (`watched`) sees which op gets which tensors, at which `place` of the model. With
`note` a definition also shows its inner tensors, such as the scores of an attention, and a program each of its ops.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Kernels = Mapping[str, Callable[..., Any]]


Watcher = Callable[[str, Mapping[str, Any], Any], None]
"""Gets an op's name, arguments by name, and result. `note` gives a key, {} and a tensor, or an op of a program."""


@dataclass(frozen=True)
class AttentionProbe:
    """A trial of attention ops in which one tensor is keys and values. Each layout of keys has an op."""

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
_watcher: Watcher | None = None
place: Any = None
"""The op of a model's program that runs now (`models.program.OpSite`); None: no program runs."""
USERS_PROBES: list[Probes] = []
"""Trials of users' ops, for the start-up probe of this process."""


def op(definition: Callable[P, R]) -> Callable[P, R]:
    """Mark the definition of an op."""
    name = definition.__name__
    OPS[name] = definition

    @functools.wraps(definition)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        chosen = definition if _kernels is None else _kernels.get(name) or _registered.get(name)
        if chosen is None:
            raise NotImplementedError(
                f"numerics: found no kernel for the op {name}, expected one, because this process runs kernels and "
                "a torch definition may give other bits than the other side's kernel. Write the kernel, or use a CPU"
            )
        made: R = chosen(*args, **kwargs)
        if _watcher is not None:
            _watcher(name, inspect.signature(definition).bind(*args, **kwargs).arguments, made)
        return made

    return call


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call the watcher after each op of this process inside the block."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def note(key: str, *tensors: Any) -> None:
    """Show the watcher tensors that no op takes or returns. key: their class in the precision map, or `PROGRAM`."""
    if _watcher is not None:
        for tensor in tensors:
            _watcher(key, {}, tensor)


def composed(definition: Callable[P, R]) -> Callable[P, R]:
    """Mark the definition of an op that only calls other ops. It also runs where kernels run."""
    register_kernel(definition)
    return op(definition)


def register_kernel(kernel: Callable[..., Any]) -> None:
    """Register a kernel that is not in `numerics.kernels`, for this process. It has its op's name."""
    _registered[kernel.__name__] = kernel


def install(kernels: Kernels | None) -> None:
    """Let all ops of this process run these kernels; None: their definitions."""
    global _kernels
    _kernels = kernels


def installed() -> Kernels | None:
    """Return the kernels that `install` was last given."""
    return _kernels
