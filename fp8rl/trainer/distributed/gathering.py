"""Changes how Megatron's optimizer gathers masters and moments for a checkpoint, and computes the gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from torch import Tensor

from fp8rl.trainer import device
from fp8rl.trainer.distributed.offload import HostCopy

AT_ONCE = 16 << 20
"""Number of gathered elements that a GPU holds at a time. Megatron's own code holds a whole buffer twice."""
_KEYS = ("param", "exp_avg", "exp_avg_sq")


class GatheredInPieces(DistributedOptimizer):  # type: ignore[misc]
    """Megatron's distributed optimizer, with two changes.

    It gathers its state for a checkpoint through the GPU piece by piece. It computes the gradient norm from one norm
    for each expert, also if one parameter has all experts.
    """

    host_copy: HostCopy
    """Keeps masters and moments in host memory while engines need the device."""
    beside: Sequence[DistributedOptimizer]
    """All optimizers of the rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the state that belongs to no parameter.

        With torch's Adam, Megatron reads the number of steps from the state of a parameter. If a pipeline stage has no
        experts, its experts' optimizer has no parameter. The number then comes from the rank's other optimizers.
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
        """Return the gradients from whose norms the gradient norm is computed.

        A stack of experts gives one gradient for each expert, the last expert first. Megatron has this order if each
        expert is a separate parameter.
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
        """Gather the masters and moments of each buffer, FP32 [elements] in host memory, on all ranks.

        empty_data: return zeros, into which a checkpoint is loaded.
        """
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
            ((dtype, maps),) = ranges.items()
            whole: dict[str, Any] = {key: torch.zeros(buffer.numel_unpadded) for key in _KEYS}
            start = 0
            for bucket, of_bucket in zip(buffer.buckets, maps, strict=True):
                if not empty_data:
                    size = bucket.grad_data.numel() // self.data_parallel_group.size()
                    for key in _KEYS:
                        into = whole[key][start : start + bucket.numel_unpadded]
                        read = partial(self._read, of_bucket["param_map"], key)
                        for at, piece in gathered_pieces(read, size, self.data_parallel_group):
                            there = into[at : at + len(piece)]  # what is beyond is padding
                            there.copy_(piece[: len(there)])
                start += bucket.numel_unpadded
            state[index] = {dtype: {**whole, "numel_unpadded": buffer.numel_unpadded}}
        return state

    def _read(self, parameters: Any, key: str, start: int, stop: int) -> Tensor:
        """Copy a piece of this rank's shard to the host. key: the masters, or one of the moments."""
        piece = torch.zeros(stop - start)
        for parameter, ranges in parameters.items():
            place = ranges["gbuf_local"]
            first, last = max(start, place.start), min(stop, place.end)
            if first < last:
                tensor = self.host_copy.held(self._get_main_param_and_optimizer_states(parameter)[key].detach())
                piece[first - start : last - start].copy_(tensor[first - place.start : last - place.start])
        return piece


def matrices_of_shard(name: str, parameter: Tensor, start: int, size: int) -> Iterator[tuple[str, slice]]:
    """Yield (name, slice of the shard) for each matrix of a parameter with elements in a rank's shard.

    start: where the shard starts in the parameter. size: the shard's number of elements.
    """
    if parameter.dim() < 3:
        yield name, slice(0, size)
        return
    matrix = parameter[0].numel()
    for index in range(start // matrix, -(-(start + size) // matrix)):
        yield f"{name}{index}", slice(max(0, index * matrix - start), min((index + 1) * matrix - start, size))


def gathered_pieces(read: Callable[[int, int], Tensor], size: int, group: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield (offset, piece) for the pieces of all ranks' shards. Offsets count from the start of rank 0's shard.

    read: returns the part of this rank's shard between two indices. What it returns, and the pieces, are in host
    memory. size: the size of every rank's shard. No rank ever holds a second copy of its whole shard.
    """
    ranks, here = group.size(), device.current()
    step = max(1, AT_ONCE // (ranks + 1))
    for start in range(0, size, step):
        local = read(start, min(start + step, size)).to(here)
        pieces = [torch.empty_like(local) for _ in range(ranks)]
        dist.all_gather(pieces, local, group)
        for rank, piece in enumerate(pieces):
            yield rank * size + start, piece.cpu()
