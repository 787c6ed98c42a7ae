"""Moves the trainer's tensors to host memory while engines need the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

# Megatron has `offload_to_cpu` and `restore_from_cpu`. They move tensors, so that an FP32 weight would not be its own
# master any more, and bring Adam's counters, which belong on the host, to the GPU. Here tensors stay what they are: the
# memory behind them goes and comes back, as it does in Megatron's own way with gradient buffers.

_ALIGNED = 512
"""Alignment of each storage in host memory, in bytes."""


@dataclass(frozen=True)
class OffloadReport:
    """Bytes that a rank has moved off its device (`moved`), and bytes that it still has there (`stays`)."""

    moved: int
    stays: int


class HostCopy:
    """Moves tensors to host memory and back, with the same bytes. `offloaded`: whether they are in host memory.

    The host memory is one block, which later offloads use again. With a GPU the block is pinned. Copies then run at the
    full speed of the link, on a separate stream.
    """

    def __init__(self) -> None:
        self.offloaded = False
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._kept: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._dropped: list[tuple[UntypedStorage, int]] = []

    def offload(self, keep: Iterable[Tensor], drop: Iterable[Tensor]) -> int:
        """Copy `keep` to the host, and free the memory of `keep` and `drop`. Return the number of bytes freed."""
        if not self.offloaded:
            self.offloaded = True
            storages = [tensor.untyped_storage() for tensor in keep]
            distinct = {storage._cdata: storage for storage in storages}  # several tensors may share one
            sizes = [-(-storage.nbytes() // _ALIGNED) * _ALIGNED for storage in distinct.values()]
            if sum(sizes) > len(self._arena):
                self._arena = _host_memory(sum(sizes), self._arena)
            for (key, storage), room in zip(distinct.items(), self._arena[: sum(sizes)].split(sizes), strict=True):
                self._kept[key] = storage, room[: storage.nbytes()]
            with _copying():
                for storage, host in self._kept.values():
                    host.copy_(_bytes(storage), non_blocking=True)
            for storage in distinct.values():
                storage.resize_(0)
            for tensor in drop:
                storage = tensor.untyped_storage()
                if size := storage.nbytes():
                    self._dropped.append((storage, size))
                    storage.resize_(0)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return sum(host.nbytes for _, host in self._kept.values()) + sum(size for _, size in self._dropped)

    def onload(self) -> None:
        """Allocate all memory again. Kept tensors get their former bytes, dropped tensors get zeros."""
        for storage, host in self._kept.values():
            storage.resize_(host.nbytes)
        with _copying():
            for storage, host in self._kept.values():
                _bytes(storage).copy_(host, non_blocking=True)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes(storage).zero_()
        self._kept.clear()
        self._dropped.clear()
        self.offloaded = False

    def held(self, tensor: Tensor) -> Tensor:
        """Return the tensor or, while it is offloaded, its copy on the host."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            return tensor
        host = self._kept[storage._cdata][1].view(tensor.dtype)
        return host.as_strided(tensor.size(), tensor.stride(), host.storage_offset() + tensor.storage_offset())

    def check_onloaded(self, what: str = "masters and moments") -> None:
        """Raise RuntimeError if the tensors are offloaded. what: their name in the message."""
        if self.offloaded:
            raise RuntimeError(
                f"found {what} in the host's memory, expected them on the device: the trainer's turn has "
                "to begin first (fp8rl.rl.run.syncing)"
            )


def _host_memory(size: int, former: Tensor) -> Tensor:
    """Allocate host memory to replace `former`. With a GPU it is pinned.

    It is allocated as ordinary memory and then registered, because torch rounds pinned memory up to a power of two.
    """
    new = torch.empty(size, dtype=torch.uint8)
    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        if len(former):
            torch.cuda.check_error(runtime.cudaHostUnregister(former.data_ptr()))
        torch.cuda.check_error(runtime.cudaHostRegister(new.data_ptr(), size, 0))
    return new


@contextmanager
def _copying() -> Iterator[None]:
    """On a GPU, run the copies inside the block on a separate stream. They start when all earlier work is done, and
    they are complete at the end of the block."""
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
