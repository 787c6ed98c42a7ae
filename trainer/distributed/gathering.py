"""Gathering of the masters and moments of all ranks for a checkpoint, in pieces; and the gradients of the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from torch import Tensor, UntypedStorage

from fp8rl.trainer import device

# An optimizer's state in the host's memory while somebody else needs the device.
#
# Megatron has `offload_to_cpu` and `restore_from_cpu`. They move tensors, so that an FP32 weight would not be its own
# master any more, and bring Adam's counters, which belong on the host, to the GPU. Here tensors stay what they are: the
# memory behind them goes and comes back, as it does in Megatron's own way with gradient buffers.


_ALIGNED = 512
"""Bytes at whose multiples each storage begins on the host."""


class Aside:
    """Offloads tensors of a device to the host, and restores their bytes. `away`: their memory is freed.

    The host's memory is one piece, and is kept between turns. On a GPU it is pinned: copies run at the full speed of
    the link, on a stream of their own.
    """

    def __init__(self) -> None:
        self.away = False
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._kept: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._dropped: list[tuple[UntypedStorage, int]] = []

    def leave(self, keep: Iterable[Tensor], drop: Iterable[Tensor]) -> int:
        """Copy `keep` to the host, and free its memory and that of `drop`; return the bytes that this frees."""
        if not self.away:
            self.away = True
            self._copy_out([tensor.untyped_storage() for tensor in keep])
            for tensor in drop:
                storage = tensor.untyped_storage()
                if size := storage.nbytes():
                    self._dropped.append((storage, size))
                    storage.resize_(0)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return sum(host.nbytes for _, host in self._kept.values()) + sum(size for _, size in self._dropped)

    def come_back(self) -> None:
        """Allocate all of it again: the former bytes for what was kept, zeros for what was dropped."""
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
        self.away = False

    def _copy_out(self, storages: Iterable[UntypedStorage]) -> None:
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

    def held(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its bytes, on the device or the host."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            return tensor
        host = self._kept[storage._cdata][1].view(tensor.dtype)
        return host.as_strided(tensor.size(), tensor.stride(), host.storage_offset() + tensor.storage_offset())

    def check_here(self) -> None:
        """Raise RuntimeError if their memory is gone."""
        if self.away:
            raise RuntimeError(
                "found masters and moments in the host's memory, expected them on the device: the trainer's turn has "
                "to begin first (fp8rl.rl.run.syncing)"
            )


def _host_memory(size: int, former: Tensor) -> Tensor:
    """Allocate bytes on the host in the place of `former`, pinned where there is a GPU.

    They are registered after they are there: torch's own pinned memory is of the next power of two.
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
    """Copy on a stream of its own on a GPU: behind what was asked for before, and done at the end of the block."""
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


AT_ONCE = 16 << 20
"""Elements of all ranks that a GPU holds at a time. Megatron has it hold a whole buffer, twice."""
_KEYS = ("param", "exp_avg", "exp_avg_sq")


class GatheredInPieces(DistributedOptimizer):  # type: ignore[misc]
    """Megatron's distributed optimizer, with two changes.

    Its state for a checkpoint goes through a GPU piece by piece, and it takes the norm of each expert's gradient by
    itself.
    """

    aside: Aside
    """The offload of the state while others need the device."""
    beside: Sequence[DistributedOptimizer]
    """All optimizers of the rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that belongs to no parameter.

        With torch's Adam, Megatron takes the number of steps from a parameter's state, and the experts' optimizer of a
        pipeline stage without experts has none.
        """
        if self.optimizer.state or HAVE_APEX_OR_TE:
            found: dict[str, Any] = super().state_dict()
            return found
        counted = (float(state["step"]) for other in self.beside for state in other.optimizer.state.values())
        steps, inner = next(counted, 0.0), self.optimizer.state_dict()
        groups = [{**group, "step": steps} for group in inner["param_groups"]]
        for group in groups:
            del group["params"]
        return {"optimizer": {"param_groups": groups}}

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Return the gradients whose norms are squared and added.

        Experts' are taken one by one, the last first, as Megatron has them that are parameters of their own.
        """
        whole: list[Tensor] = super().get_main_grads_for_grad_norm()
        pieces: dict[int, list[Tensor]] = {}
        for parameter, (group, order) in self.model_param_group_index_map.items():
            master = self.optimizer.param_groups[group]["params"][order]
            part = self._get_model_param_range_map(parameter)["param"]
            for gradient in (master.grad, getattr(master, "decoupled_grad", None)):
                if parameter.dim() == 3 and gradient is not None:
                    places = matrices_of_shard("", parameter, part.start, part.size)
                    pieces[id(gradient)] = [gradient[place] for _, place in places][::-1]
        return [piece for gradient in whole for piece in pieces.get(id(gradient), [gradient])]

    def get_parameter_state_dp_zero(
        self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict[Any, Any]:
        """Gather masters and moments of each buffer [elements] in FP32 on the host, on all ranks, whatever is asked
        for.

        empty_data: return zeros, into which a checkpoint is loaded.
        """
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
            ((dtype, maps),) = ranges.items()
            whole: dict[str, Any] = {key: torch.zeros(buffer.numel_unpadded) for key in _KEYS}
            start = 0
            for bucket, held in zip(buffer.buckets, maps, strict=True):
                if not empty_data:
                    size = bucket.grad_data.numel() // self.data_parallel_group.size()
                    for key in _KEYS:
                        into = whole[key][start : start + bucket.numel_unpadded]
                        read = partial(self._read, held["param_map"], key)
                        for at, piece in gathered(read, size, self.data_parallel_group):
                            there = into[at : at + len(piece)]  # what is beyond is padding
                            there.copy_(piece[: len(there)])
                start += bucket.numel_unpadded
            state[index] = {dtype: {**whole, "numel_unpadded": buffer.numel_unpadded}}
        return state

    def _read(self, parameters: Any, key: str, start: int, stop: int) -> Tensor:
        """Copy a piece of this rank's shard of the masters, or of a moment, to the host."""
        piece = torch.zeros(stop - start)
        for parameter, ranges in parameters.items():
            place = ranges["gbuf_local"]
            first, last = max(start, place.start), min(stop, place.end)
            if first < last:
                tensor = self.aside.held(self._get_main_param_and_optimizer_states(parameter)[key].detach())
                piece[first - start : last - start].copy_(tensor[first - place.start : last - place.start])
        return piece


def matrices_of_shard(name: str, parameter: Tensor, start: int, size: int) -> Iterator[tuple[str, slice]]:
    """Yield the name of each of a parameter's `matrices` that overlaps a rank's shard of it, and the slice of the
    shard.

    The shard is `size` of the parameter's elements, from `start` on.
    """
    if parameter.dim() < 3:
        yield name, slice(0, size)
        return
    each = parameter[0].numel()
    for index in range(start // each, -(-(start + size) // each)):
        yield f"{name}{index}", slice(max(0, index * each - start), min((index + 1) * each - start, size))


def gathered(read: Callable[[int, int], Tensor], size: int, group: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield every rank's shard, one rank after the other, in pieces on the host: the start of each, and the piece.

    read: returns a piece of this rank's shard, from one index to another, on the host. size: of a shard, the same on
    all ranks. No rank ever holds a second copy of its shard.
    """
    ranks, here = group.size(), device.current()
    step = max(1, AT_ONCE // (ranks + 1))
    for start in range(0, size, step):
        own = read(start, min(start + step, size)).to(here)
        pieces = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(pieces, own, group)
        for rank, piece in enumerate(pieces):
            yield rank * size + start, piece.cpu()
