"""The device of this process: a GPU of its own for each trainer rank if there are GPUs, else the CPU.

It is chosen once (`trainer.distributed.parallel.start`). After that everything asks `current`, or
`torch.cuda.current_device()` as Megatron does (`trainer.megatron.patches` answers it without CUDA).
"""

from __future__ import annotations

import importlib.util

import torch

CPU = torch.device("cpu")


def claim(rank: int) -> torch.device:
    """Make this rank's GPU the current one: the only one that it sees, or one of those that a node's ranks share."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return current()


def current() -> torch.device:
    """Return the device of parameters and batches."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def collectives(device: torch.device) -> str:
    """Return the backend of torch.distributed that moves tensors of this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def has_transformer_engine() -> bool:
    """Return True if native mode's layers are TransformerEngine's: it is installed (not imported), and there is a
    GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
