"""Chooses the device of this process: a GPU of its own for each trainer rank, or the CPU if there is no GPU.

`trainer.distributed.parallel.start` chooses it once. Later code calls `current`. Megatron calls
`torch.cuda.current_device()`, which `trainer.megatron.patches` replaces if there is no CUDA.
"""

from __future__ import annotations

import importlib.util

import torch

CPU = torch.device("cpu")


def claim(rank: int) -> torch.device:
    """Make this rank's GPU the current device, and return it. A rank sees only its own GPU, or all GPUs of its node."""
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
    """Return True if native mode uses TransformerEngine's layers. This needs a GPU and the installed package. The
    package is not imported here."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
