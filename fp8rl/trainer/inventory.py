"""Lists the tensors that a trainer rank keeps between steps, and the tensors that it sends, with their bytes.

Activations are not listed, because they exist only during a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8rl.numerics.core.memory import Holding, format_of, holding, tensors_in
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer.distributed.gathering import matrices_of_shard
from fp8rl.trainer.distributed.optimizer import Optimizer
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.modules.weights import matrices, named_weights

Kind = Literal["parameters", "operands", "gradients", "masters", "moments", "rest"]
"""The kinds of tensors that a rank keeps. `parameters`: the weights that the forward pass reads. `operands`: forms of
weights that were quantized for a product since the last update. `gradients`: the buffers that sum gradients.
`masters`: this rank's share of the weights that the optimizer updates. `moments`: this rank's share of Adam's moments.
`rest`: the padding of Megatron's buffers, and counters."""


def inventory(optimizer: Optimizer, cache: WeightCache) -> list[Holding]:
    """List all tensors that this rank keeps for a model and its optimizer. cache: the model's operands."""
    model = optimizer.model.module
    found = list(of_model(model, cache))
    for name, parameter in model.named_parameters():
        for matrix, weight in matrices(name, parameter) if parameter.requires_grad else ():
            total = parameter.main_grad
            size = weight.numel() * total.itemsize
            found.append(Holding(matrix, "gradients", format_of(total.dtype), tuple(weight.shape), size))
    for suffix, kind, tensor, places in optimizer_parts(optimizer):
        for name, place in places:
            shape = (place.stop - place.start,) if tensor.dim() else ()
            size = math.prod(shape) * tensor.itemsize
            found.append(Holding(f"{name}{suffix}", kind, format_of(tensor.dtype), shape, size))
    for index, buffer in enumerate(optimizer.buffers):
        gradients = (each.main_grad for each in model.parameters() if each in buffer.param_to_bucket)
        spare = buffer.grad_data.numel() - sum(gradient.numel() for gradient in gradients)
        for part, data in (("gradients", buffer.grad_data), ("parameters", buffer.param_data)):
            if data is not None and spare:
                name, size = f"buffer {index} of {part}: padding", spare * data.itemsize
                found.append(Holding(name, "rest", format_of(data.dtype), (spare,), size))
    return found


def of_model(model: GPTModel, cache: WeightCache) -> Iterator[Holding]:
    """List the tensors that this rank keeps for a model without an optimizer."""
    for name, parameter in named_weights(model):
        if te_runtime.is_quantized(parameter):
            form = format_of(te_runtime.quantized(parameter).data.dtype)
            total = sum(tensor.nbytes for tensor in te_runtime.stored(parameter))
            yield Holding(name, "parameters", form, tuple(parameter.shape), total)
        else:
            yield holding(name, "parameters", parameter.data)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for weight, operand in cache.operands():
        first, _ = next(matrices(names[id(weight)], weight))
        yield holding(first, "operands", *tensors_in(operand))


@dataclass(frozen=True)
class Transfer:
    collective: str
    """Torch's name of the collective, e.g. `reduce_scatter_tensor_coalesced_`."""
    format: str
    """Format of this rank's input."""
    shape: tuple[int, ...]
    """Shape of this rank's input."""
    bytes: int
    """Bytes of this rank's input."""
    ranks: int
    """Number of ranks that take part. With 1, nothing is sent."""


@contextmanager
def transfers() -> Iterator[list[Transfer]]:
    """Record the collectives of this rank inside the block."""
    with _Listener() as listener:
        yield listener.heard


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Transfer] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.heard.append(_transfer(func, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


def _transfer(func: Any, arguments: list[Any]) -> Transfer:
    """Describe one call of a c10d operator of torch."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    # A boxed argument may be a process group, or what its ranks do with the numbers.
    boxed = [each for each in arguments if isinstance(each, torch.ScriptObject)]
    groups = [value for value in boxed if value._type().qualified_name().endswith(".ProcessGroup")]
    # Where it writes to comes first: a rank hands in the last of the tensors.
    sent = tensors[-1] if tensors else torch.empty(0)
    return Transfer(
        collective=func.__name__.partition(".")[0],
        format=format_of(sent.dtype),
        shape=tuple(sent.shape),
        bytes=sent.nbytes,
        ranks=max((dist.ProcessGroup.unbox(group).size() for group in groups), default=1),
    )


def optimizer_state(optimizer: Optimizer) -> Iterator[tuple[str, Kind, Tensor]]:
    """Yield (name, kind, tensor) for each weight in each tensor of this rank's optimizer.

    The name is the weight's name in `named_weights`, then a suffix for the tensor such as `:exp_avg`.
    """
    for suffix, kind, tensor, places in optimizer_parts(optimizer):
        for name, place in places:
            yield f"{name}{suffix}", kind, tensor[place] if tensor.dim() else tensor


def optimizer_parts(optimizer: Optimizer) -> Iterator[tuple[str, Kind, Tensor, list[tuple[str, slice]]]]:
    """Yield (suffix, kind, tensor, the name and the slice of each weight in it) for each tensor of the optimizer, also
    if it is offloaded."""
    names = {id(parameter): name for name, parameter in optimizer.model.module.named_parameters()}
    for each in optimizer.inner.chained_optimizers:
        if each.is_stub_optimizer:  # of a rank without such parameters
            continue
        for parameter, (group, order) in each.model_param_group_index_map.items():
            master, name = each.optimizer.param_groups[group]["params"][order], names[id(parameter)]
            part = each._get_model_param_range_map(parameter)["param"]
            places = list(matrices_of_shard(name, parameter, part.start, part.size))
            if _storage(master) != _storage(parameter):  # an FP32 parameter is its own master
                yield "", "masters", master.data, places
            for key, value in each.optimizer.state[master].items():
                if isinstance(value, Tensor):
                    kind: Kind = "moments" if key.startswith("exp_avg") else "rest"
                    of = places if value.dim() else [(name, slice(0, 1))]
                    yield f":{key}", "masters" if key == "master_param" else kind, value, of


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
