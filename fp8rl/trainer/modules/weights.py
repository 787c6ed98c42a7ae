"""Makes parameters, and tags them for Megatron, which must know how ranks split a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from fp8rl.trainer.config import STACK_ELEMENTS


def tag_split(weight: Tensor, axis: int) -> None:
    """Tag a weight as split over the tensor-parallel ranks along `axis`.

    Megatron would set the tag when it initialises a weight, but the trainer skips the initialisation. The gradient norm
    and the export of weights read the tag.
    """
    set_tensor_model_parallel_attributes(weight, True, axis, 1)


def norm_parameter(config: TransformerConfig, size: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a norm's weight, all ones, with Megatron's `sequence_parallel` tag.

    With this tag Megatron adds the gradients of the tensor-parallel ranks, each of which sees a part of the sequence.
    """
    weight = nn.Parameter(torch.ones(size, dtype=dtype or config.params_dtype, device=torch.cuda.current_device()))
    setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return weight


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters with TransformerEngine's names. Stacked experts give views `weight0`, `weight1`, …"""
    for name, parameter in model.named_parameters():
        yield from matrices(name, parameter)


def matrices(name: str, of_parameter: Tensor, stacked: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for a parameter or another tensor of its shape. If it is 3-D, yield each expert's matrix.

    stacked: yield stacks of these matrices [n, N, K], each with the name of its first matrix.
    """
    if of_parameter.dim() < 3:
        yield name, of_parameter
    elif stacked:
        step = max(1, STACK_ELEMENTS // of_parameter[0].numel())
        yield from ((f"{name}{n * step}", stack) for n, stack in enumerate(of_parameter.detach().split(step)))
    else:
        yield from ((f"{name}{index}", matrix) for index, matrix in enumerate(of_parameter.detach()))


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2].startswith("lora_")


def beside(weight: str, letter: str) -> str:
    """Return the name of the adapter's parameter `a` or `b` for a weight. An expert's number stays at the end."""
    before, _, number = weight.rpartition("weight")
    return f"{before}lora_{letter}{number}"


def empty_weight(config: TransformerConfig, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return an uninitialised parameter."""
    device = torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=dtype or config.params_dtype, device=device))
