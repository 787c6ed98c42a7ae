"""The device of this process: a GPU of its own for each trainer rank if there are GPUs, else the CPU.

It is chosen once, and with it all that depends on it. After that everything asks `current`, or
`torch.cuda.current_device()` as Megatron does (`trainer.megatron.patches` answers it without CUDA).
"""

from __future__ import annotations

import importlib.util

import torch

from fp8rl.numerics.backend import implementation
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.backend.cuda_toolkit import use_toolkit
from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.megatron.lowering import lower

CPU = torch.device("cpu")


def start(rank: int, numerics: NumericsConfig) -> None:
    """Choose the device, the ops' implementation and TransformerEngine's environment, before a process imports
    Megatron. Raises UserError: TransformerEngine is here and cannot run this spec."""
    te_runtime.prepare(lower(numerics, has_transformer_engine()))
    device = claim(rank)
    if device == CPU:
        enable_compiler()  # on a GPU the compiled code would divide approximately, and kernels do its work
    else:
        use_toolkit()
    implementation.choose(device, numerics.spec)


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
