"""Manages the memory of a process: an inventory of tensors, placeholders for tensors that come later, batches of
tensors, and memory that other processes map.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import fcntl
import json
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


@dataclasses.dataclass(frozen=True)
class Holding:
    """An entry of an inventory of memory: one tensor, or an object that holds a tensor's bytes."""

    name: str
    """The name of the tensor's parameter in the trainer or engine, or the name of a buffer."""
    kind: str
    """The tensor's purpose: `parameters`, `masters`, …; see the inventory that lists it."""
    format: str
    """`fp32`, `bf16`, `e4m3`, `e5m2`, or the dtype as torch names it."""
    shape: tuple[int, ...]
    """The shape of this process's part."""
    bytes: int
    """Size of the tensor, its scales and its transposed copies."""


def format_of(dtype: torch.dtype) -> str:
    """Return a dtype as specs and inventories name it."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def holding(name: str, kind: str, *tensors: Tensor) -> Holding:
    """Return the holding of one or several tensors; the first gives the format and the shape."""
    first = tensors[0]
    return Holding(name, kind, format_of(first.dtype), tuple(first.shape), sum(tensor.nbytes for tensor in tensors))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operand (`numerics.ops.weight_operand`), in whatever form an implementation gives it."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for each in vars(value).values():  # and what it has made of its fields since
            yield from tensors_in(each)


def give_back() -> None:
    """Give freed memory back to the system: the C library's blocks, and torch's blocks on the GPU.

    By itself the C library keeps every block that is no larger than the largest block that it has given back.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


# Placeholders, for models whose weights come later: all parameters of such a model share one piece of memory, as large
# as the largest parameter. So each parameter has memory that kernels and CUDA graphs may read, and that may be filled.

ZEROS, NAN = 0x00, 0xFF
"""Bytes that placeholders are filled with: zeros in every format, and NaN in every format that has NaN."""


@contextmanager
def placeholders(fill: int) -> Iterator[None]:
    """Let all parameters that modules get inside the block share memory. After the block all its bytes are `fill`."""
    memory: dict[torch.device, Tensor] = {}  # for each device, as much as the largest parameter so far takes
    taken: list[nn.Parameter] = []

    def place(parameter: nn.Parameter) -> None:
        start = memory[parameter.device][: parameter.nbytes]
        parameter.data = start.view(parameter.dtype).view(parameter.shape)

    def take(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        known = memory.get(parameter.device)
        if known is None or known.numel() < parameter.nbytes:
            memory[parameter.device] = parameter.data.contiguous().view(-1).view(torch.uint8)
        taken.append(parameter)
        place(parameter)

    hook = register_module_parameter_registration_hook(take)  # torch calls it before a module gets a parameter
    try:
        yield
    finally:
        hook.remove()
    for parameter in taken:  # those that came before the largest are on a smaller one
        place(parameter)
    for shared in memory.values():
        shared.fill_(fill)
    give_back()


def own_memory(parameter: Tensor) -> None:
    """Give a parameter memory of its own, with zeros."""
    parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


class Sized(Protocol):
    """A tensor, or any other object that has a size in bytes."""

    @property
    def nbytes(self) -> int: ...


N = TypeVar("N")
T = TypeVar("T", bound=Sized)


def batches_by_bytes(tensors: Iterable[tuple[N, T]], limit: int) -> Iterator[list[tuple[N, T]]]:
    """Yield lists of consecutive tensors of at most `limit` bytes in total; a larger tensor comes alone."""
    batch: list[tuple[N, T]] = []
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch


def numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each member of groups, which have `counts` members, its group and its number in the group."""
    group = torch.arange(len(counts)).repeat_interleave(counts)
    return group, torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, a tensor of the same shape. Tensors of the same dtype take one launch."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.dtype == source.dtype and target.dtype.itemsize == 1:  # FP8 as bytes, which every torch copies
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        groups.setdefault((target.dtype, source.dtype), []).append((target, source))
    for pairs in groups.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


# Memory that several processes of a machine map.
#
# On a CPU no process can write to the memory once it is sealed. It has no name in a file system. So it is freed when
# the last process has unmapped it or ended, in whatever way, and it may be larger than /dev/shm. Processes that may
# inspect the owner open it by its address. On a GPU the owner has the memory; others map it by CUDA IPC, and may write.

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_ON_GPU = "cuda:"


def share(name: str, size: int, device: torch.device) -> Shared:
    """Return `size` bytes of zeros for other processes, on a device."""
    return HostMemory(name, size) if device.type == "cpu" else DeviceMemory(size, device)


class HostMemory:
    """Memory of the CPU. Processes can map it while this object lives, and have it until they unmap it."""

    def __init__(self, name: str, size: int) -> None:
        self._file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)

    def address(self) -> str:
        """Return the path by which processes of the same user map the memory."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def own(self, *, writable: bool = False) -> torch.Tensor:
        """Return the memory in this process, uint8 [size]."""
        return mapped(self.address(), writable=writable)

    def seal(self) -> None:
        """Let no process write to the memory from now on. Raises OSError: some process has mapped it for writing."""
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)


class DeviceMemory:
    """Memory of a GPU, owned as long as this object lives. An address is good for one reader."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat = torch.zeros(size, dtype=torch.uint8, device=device)

    def address(self) -> str:
        index, *rest = self.flat.untyped_storage()._share_cuda_()
        handle = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in rest]
        uuid = str(torch.cuda.get_device_properties(index).uuid)  # processes may number the same GPUs differently
        return _ON_GPU + json.dumps([uuid, len(self.flat), *handle])

    def own(self, *, writable: bool = False) -> torch.Tensor:
        return self.flat  # CUDA does not map an address in the owner's process

    def seal(self) -> None:
        """Do nothing: CUDA IPC has no read-only memory. Digests find out whether a process has written to it."""


Shared = HostMemory | DeviceMemory


def mapped(address: str, *, writable: bool = False) -> Tensor:
    """Return the memory at an address, uint8 [size]. Without `writable`, a write to it ends the process (SIGSEGV).
    Raises OSError: there is no such memory, or it is sealed and `writable` was asked for."""
    if address.startswith(_ON_GPU):
        uuid, size, *handle = json.loads(address.removeprefix(_ON_GPU))
        seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        if uuid not in seen:
            raise OSError(f"GPU {uuid}: found {seen} in this process, expected the one that holds the memory")
        # The way of torch.multiprocessing with a tensor that was sent, without a pickle.
        parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle]
        storage = torch.UntypedStorage._new_shared_cuda(seen.index(uuid), *parts)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]
    with open(address, "r+b" if writable else "rb", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that it knows to be read-only
        return torch.frombuffer(memory, dtype=torch.uint8)
