"""An optimizer's state in the host's memory while somebody else needs the device.

Megatron has `offload_to_cpu` and `restore_from_cpu`. They move tensors, so that an FP32 weight would not be its own
master any more, and bring Adam's counters, which belong on the host, to the GPU. Here tensors stay what they are: the
memory behind them goes and comes back, as it does in Megatron's own way with gradient buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class Aside:
    """Frees the memory of tensors that live on a device, and brings it back with the same bytes.

    Attributes:
        away: whether their memory is gone.
    """

    def __init__(self) -> None:
        self.away = False
        self._kept: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._dropped: list[tuple[UntypedStorage, int]] = []

    def leave(self, keep: Iterable[Tensor], drop: Iterable[Tensor]) -> int:
        """Copy `keep` to the host, and free its memory and that of `drop`; the bytes that this frees."""
        self.away = True
        for tensor in keep:
            storage = tensor.untyped_storage()
            if storage.nbytes():  # several tensors may share it
                self._kept[storage._cdata] = storage, _bytes(storage).to("cpu", copy=True)
                storage.resize_(0)
        for tensor in drop:
            storage = tensor.untyped_storage()
            if size := storage.nbytes():
                self._dropped.append((storage, size))
                storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(host.nbytes for _, host in self._kept.values()) + sum(size for _, size in self._dropped)

    def come_back(self) -> None:
        """Give all of it memory again: the former bytes to what was kept, zeros to what was dropped."""
        while self._kept:
            storage, host = self._kept.popitem()[1]
            storage.resize_(host.nbytes)
            _bytes(storage).copy_(host)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes(storage).zero_()
        self._dropped.clear()
        self.away = False

    def held(self, tensor: Tensor) -> Tensor:
        """The tensor, wherever its bytes are now."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            return tensor
        host = self._kept[storage._cdata][1].untyped_storage()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(host, *place)

    def check_here(self) -> None:
        """Raise RuntimeError if their memory is gone."""
        if self.away:
            raise RuntimeError(
                "found masters and moments in the host's memory, expected them on the device: the trainer's turn has "
                "to begin first (fp8rl.rl.run.turns)"
            )


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
