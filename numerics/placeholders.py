"""Models whose weights come later, and need no memory of their own until then: all parameters of such a model share one
piece, as large as the largest of them.

Kernels, CUDA graphs and whoever fills parameters with something find memory behind each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8rl.numerics.holdings import give_back

ZEROS, NAN = 0x00, 0xFF
"""Bytes that placeholders are filled with: zeros in every format, and NaN in every one that has it."""


@contextmanager
def placeholders(fill: int) -> Iterator[None]:
    """Have the parameters that modules get within the block share their memory, of bytes `fill` at its end."""
    shared = _Shared()
    hook = register_module_parameter_registration_hook(shared.take)
    try:
        yield
    finally:
        hook.remove()
    shared.settle(fill)


def own_memory(parameter: Tensor) -> None:
    """Give a parameter memory of its own, with zeros."""
    parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


class _Shared:
    """The largest memory that a parameter came with so far, on each device, and all who came."""

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}
        self._taken: list[nn.Parameter] = []

    def take(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Called by torch before a module gets a parameter."""
        known = self._memory.get(parameter.device)
        if known is None or known.numel() < parameter.nbytes:
            self._memory[parameter.device] = parameter.data.contiguous().view(-1).view(torch.uint8)
        self._taken.append(parameter)
        self._place(parameter)

    def settle(self, fill: int) -> None:
        for parameter in self._taken:  # those that came before the largest are on a smaller one
            self._place(parameter)
        for memory in self._memory.values():
            memory.fill_(fill)
        give_back()

    def _place(self, parameter: nn.Parameter) -> None:
        own = self._memory[parameter.device][: parameter.nbytes]
        parameter.data = own.view(parameter.dtype).view(parameter.shape)
