"""The device of this process: each trainer rank has a GPU of its own if there are GPUs, else the CPU.

The device is chosen once (`trainer.distributed.parallel.start`). After that code calls `current`, or
`torch.cuda.current_device()` as Megatron does (without CUDA, `trainer.megatron.patches` replaces that function).
"""

from __future__ import annotations

import importlib.util

import torch

CPU = torch.device("cpu")


def claim(rank: int) -> torch.device:
    """Make this rank's GPU the current one: the only GPU that it sees, or its own among the GPUs of a node's ranks."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return current()


def current() -> torch.device:
    """Return the device of parameters and batches."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def collectives(device: torch.device) -> str:
    """Return the torch.distributed backend for tensors on this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def has_transformer_engine() -> bool:
    """Return True if native mode uses TransformerEngine's layers: the package is installed (it need not be imported)
    and there is a GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
