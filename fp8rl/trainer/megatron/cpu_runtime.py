"""Replaces parts of CUDA, so that stock megatron-core runs without it. `patches` says where and why each part is used.

Megatron asks `torch.cuda` for devices, streams and random states, creates tensors with ``device="cuda"``, and compares
tensor type names with ``torch.cuda.*``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


def no_op(replaced: object = None) -> Callable[..., None]:
    """Return a new function that does nothing: torch.compile keeps a rule for each function object."""
    return lambda *args, **kwargs: None


class HostEvent:
    """Replaces a CUDA event. The CPU has no queue, so every event has already happened."""

    record, wait, synchronize = no_op(), no_op(), no_op()

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        return True


class HostStream:
    """Replaces a CUDA stream. The CPU runs everything in program order."""

    wait_stream, wait_event, synchronize = no_op(), no_op(), no_op()

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event or HostEvent()


class TorchOnCpu:
    """Replaces `torch` in a few modules of Megatron. It creates tensors for ``"cuda"`` on the CPU.

    torch's own functions do not change, because other libraries (transformers) depend on their identity.
    """

    def __init__(self, replaced: object = None) -> None: ...

    def __getattr__(self, name: str) -> Any:
        value = factory = getattr(torch, name)
        if name in ("zeros", "ones", "empty", "full", "tensor", "empty_like", "zeros_like"):

            @functools.wraps(factory)
            def create(*args: Any, **kwargs: Any) -> torch.Tensor:
                if kwargs.get("device") == "cuda":
                    kwargs["device"] = CPU
                return factory(*args, **kwargs)

            value = create
        setattr(self, name, value)
        return value


def cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `Tensor.type` that returns a type name ``torch.cuda.*`` for a CPU tensor."""

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return type_name


def split_sizes_as_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `maybe_move_tensor_to_cpu` in which `as_numpy` also converts tensors on the CPU."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    return move


def step_of_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `_set_main_param_and_optimizer_states` that keeps each parameter's `step` (AdamW)."""

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step", None)
        with torch.no_grad():
            original(self, model_param, {key: value for key, value in tensors.items() if key != "step"})
        if step is not None:
            state["step"] = step.clone()

    return set_states
