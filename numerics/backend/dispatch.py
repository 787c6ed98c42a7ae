"""Ops with two implementations: a pure-torch definition, which is also the oracle, and a Triton kernel.

An op is a function marked with `op`. Calling it calls its definition or, once kernels are installed in the process, its
kernel, which goes by the definition's name and has its signature. A process chooses once, at its start, by its device
and the run's spec (`choose`). Kernels of our ops lie in `numerics.kernels`. A file of ops may say, as PROBES, how the
start-up probe tries them (`numerics.backend.probe`). A family of ops that is not ours registers its kernels, and
appends its probes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from fp8rl.numerics.spec import Granularity, QuantSpec, TensorSpec

P = ParamSpec("P")
R = TypeVar("R")
Kernels = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class AttentionProbe:
    """Attention over one tensor of keys, which has the values in it: three ops, by where the keys lie."""

    name: str
    queries: tuple[int, ...]
    """Shape of a token's queries in a trial."""
    keys: tuple[int, ...]
    """Shape of a token's keys and values."""
    whole: Callable[..., Any]
    """Over keys [B, T, ...], as `numerics.ops.attention`."""
    packed: Callable[..., Any]
    """Over rows end to end, as `numerics.ops.packed_attention`."""
    paged: Callable[..., Any]
    """Over the slots of a cache, as `numerics.ops.paged_attention`."""
    values: int = 0
    """The leading numbers of a key that are its value, which the ops are given in place of values; 0: they take
    values."""

    def attend(self, op: Callable[..., Any], queries: Any, keys: Any, *where: Any) -> Any:
        """Call one of the ops."""
        if self.values:
            return op(queries, keys, *where, self.values, 0.1)
        return op(queries, keys, keys, *where, 0.1)


@dataclass(frozen=True)
class Probes:
    """Trials of ops that only some models have."""

    rows: Callable[[Callable[..., Any], int], Mapping[str, Callable[[int], Any]]]
    """Of a function that draws BF16 numbers [shape] and of a number of rows: by name, what gives an op's result for the
    first so many of them."""
    attention: AttentionProbe | None = None


OPS: dict[str, Callable[..., Any]] = {}
"""The definitions by name, once their modules are imported."""
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
                f"numerics: found no kernel for the op {name}, expected one for every op where kernels run; its torch "
                "definition would be another implementation than the other side's. Write the kernel, or use a CPU"
            )
        return kernel(*args, **kwargs)  # type: ignore[no-any-return]

    return call


def register_kernel(kernel: Callable[..., Any]) -> None:
    """Make the kernel of a user's op known in this process, by its name. It runs where kernels run."""
    _registered[kernel.__name__] = kernel


def install(kernels: Kernels | None) -> None:
    """Run all ops of this process on these kernels; None: on their definitions."""
    global _kernels
    _kernels = kernels


def installed() -> Kernels | None:
    """Return the kernels that `install` was last given."""
    return _kernels


Implementation = Literal["torch", "triton"]

FEWEST_CAPABILITY = (8, 9)
"""Compute capability from which a GPU converts to FP8."""
SMALL_CAPABILITY = (12, 0)
"""GPUs from this capability on have less shared memory again (99 KiB) than a product's tile takes."""
_HOPPER = 9
"""Major capability of the GPUs on which DeepGEMM multiplies by our formula; on later ones it scales otherwise."""
_GROUP = 128
# Weights in blocks alone: the gradient of the input sums over their rows, where the scales of groups change at each.
_GRANULARITY: dict[str, Granularity] = {"weight": "block", "activation": "token_group", "gradient": "token_group"}


def choose(device: torch.device | str, spec: QuantSpec) -> Implementation:
    """Choose the implementation for the rest of this process, and return it."""
    implementation = implementation_for(capability_of(device), spec)
    _install(implementation)
    return implementation


def capability_of(device: torch.device | str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None for a CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def implementation_for(capability: tuple[int, int] | None, spec: QuantSpec) -> Implementation:
    """Return what `choose` takes on a device of this compute capability (None: a CPU): kernels if they know the
    spec."""
    if capability is None or not FEWEST_CAPABILITY <= capability < SMALL_CAPABILITY:
        return "torch"
    for name, granularity in _GRANULARITY.items():
        role: TensorSpec = getattr(spec, name)
        scaled = role.scale in ("pow2", "fp32") and role.rounding == "nearest"
        if role.quantized and not (scaled and role.granularity == granularity and role.group == _GROUP):
            return "torch"
    return "triton"


def has_deepgemm() -> bool:
    """Return True if DeepGEMM is installed. Does not import it."""
    return importlib.util.find_spec("deep_gemm") is not None


def deepgemm_lacks(capability: tuple[int, int] | None, installed: bool) -> str | None:
    """Name what DeepGEMM's products lack on a device of this compute capability (None: a CPU); None: nothing."""
    if capability is None or capability[0] != _HOPPER:
        return "Hopper GPU (compute capability 9.0)"
    return None if installed else "DeepGEMM (the package sgl-deep-gemm)"


@contextlib.contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Run another implementation inside the block: for tests and benchmarks that compare the two."""
    previous = installed()
    _install(implementation)
    try:
        yield
    finally:
        install(previous)


def _install(implementation: Implementation) -> None:
    if implementation == "torch":
        install(None)
    else:
        from fp8rl.numerics.kernels.kernels import KERNELS  # Triton is imported where its kernels run, and nowhere else

        install(KERNELS)


# Environment variables of every process that multiplies: ranks of a trainer, engines.

BOUNDED_MEMORY = {
    # oneDNN keeps a kernel of about a megabyte for every shape of a product, 1,024 of them if it is not told otherwise,
    # and experts get another number of tokens in each batch. Making one anew costs nothing that can be measured.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"
}
