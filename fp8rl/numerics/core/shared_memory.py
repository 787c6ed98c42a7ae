"""Memory that several processes of a machine map.

On a CPU nobody can write the memory once it is sealed. It has no name in a file system: it is freed with the last
process that maps it, however that process ends, and the size of /dev/shm does not limit it. A process that may inspect
the owner opens the memory by its address. On a GPU the memory belongs to its owner. Other processes map it by CUDA IPC,
and nothing keeps them from writing.
"""

from __future__ import annotations

import base64
import fcntl
import json
import mmap
import os
import warnings
from typing import Protocol

import torch
from torch import Tensor

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_ON_GPU = "cuda:"


class Shared(Protocol):
    """Memory that this process owns."""

    def address(self) -> str:
        """Return the address by which one other process maps the memory, as long as this process holds it."""

    def own(self, *, writable: bool = False) -> torch.Tensor:
        """Return this process's own view of the memory, uint8 [size]: CUDA opens a handle only in other processes."""

    def seal(self) -> None:
        """Refuse every write from now on, in every process, where that can be done. Raises OSError if a process has
        mapped the memory writable."""


def share(name: str, size: int, device: torch.device) -> Shared:
    """Return `size` bytes of zeros for other processes, on a device."""
    return HostMemory(name, size) if device.type == "cpu" else DeviceMemory(size, device)


class HostMemory:
    """Memory of the host, owned until `close`."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self._file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, size)

    def address(self) -> str:
        """Return the path by which processes of the same user map it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def own(self, *, writable: bool = False) -> torch.Tensor:
        return mapped(self.address(), writable=writable)

    def seal(self) -> None:
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        """Forget the address. Processes that have mapped the memory keep it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


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
        return self.flat

    def seal(self) -> None:
        """Do nothing: CUDA IPC has no memory that can only be read. A digest finds what was written."""


def mapped(address: str, *, writable: bool = False) -> Tensor:
    """Return the memory at an address, uint8 [size]. A write without `writable` ends the process (SIGSEGV). Raises
    OSError if there is no such memory, or if it is sealed and `writable` is set."""
    if address.startswith(_ON_GPU):
        uuid, size, *handle = json.loads(address.removeprefix(_ON_GPU))
        seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        if uuid not in seen:
            raise OSError(f"GPU {uuid}: found {seen} in this process, expected the one that holds the memory")
        # The way of torch.multiprocessing with a tensor that was sent, without a pickle.
        parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle]
        storage = torch.UntypedStorage._new_shared_cuda(seen.index(uuid), *parts)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]
    file = os.open(address, os.O_RDWR if writable else os.O_RDONLY)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = mmap.mmap(file, os.fstat(file).st_size, mmap.MAP_SHARED, protection)
    finally:
        os.close(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that it knows to be read-only
        return torch.frombuffer(memory, dtype=torch.uint8)
