"""Chooses the implementation of the ops in this process: their pure-torch definitions, or the Triton kernels.

A process chooses once, at its start, by its device and the run's spec.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.spec import Granularity, QuantSpec, TensorSpec

Implementation = Literal["torch", "triton"]

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities of an H100 and of a B200."""
FEWEST_CAPABILITY = (8, 9)
"""The least compute capability of a GPU that converts to FP8."""
SMALL_CAPABILITY = (12, 0)
"""From this compute capability on, a product's tile does not fit a GPU's shared memory (99 KiB)."""
_GROUP = 128
# Weights only in blocks: the input's gradient sums over a weight's rows, and scales of groups differ in each row.
_GRANULARITY: dict[str, Granularity] = {"weight": "block", "activation": "token_group", "gradient": "token_group"}


def choose(device: torch.device | str, spec: QuantSpec) -> Implementation:
    """Choose the implementation for the rest of this process, and return it."""
    implementation = implementation_for(capability_of(device), spec)
    # cuBLAS may add the parts of a long sum in BF16 otherwise; gradients are sums in FP32 that are rounded once.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    _install(implementation)
    if implementation == "triton":
        from fp8rl.numerics.kernels.cache import watch

        watch()
    return implementation


def capability_of(device: torch.device | str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None for a CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def implementation_for(capability: tuple[int, int] | None, spec: QuantSpec) -> Implementation:
    """Return the implementation for a device of this compute capability (None: a CPU): the kernels if they support the
    device and the spec."""
    if capability is None or not FEWEST_CAPABILITY <= capability < SMALL_CAPABILITY:
        return "torch"
    for name, granularity in _GRANULARITY.items():
        role: TensorSpec = getattr(spec, name)
        if role.quantized and not (kernels_quantize_by(role) and role.granularity == granularity):
            return "torch"
    return "triton"


def kernels_quantize_by(spec: TensorSpec) -> bool:
    """Return True if the kernels have the groups, the scales and the rounding of a spec of FP8 tensors."""
    grouped = spec.granularity in ("token_group", "block") and spec.group == _GROUP
    return grouped and spec.scale in ("pow2", "fp32") and spec.rounding == "nearest"


def expandable_segments(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the setting that makes torch's allocator use expandable segments; None: there is no such setting.

    Memory in such segments cannot be shared by a CUDA IPC handle, and cannot be released while an engine sleeps.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
            return f"{name}={environment[name]}"
    return None


def has_deepgemm() -> bool:
    """Return True if DeepGEMM is installed. Does not import it."""
    return importlib.util.find_spec("deep_gemm") is not None


def deepgemm_lacks(capability: tuple[int, int] | None, installed: bool) -> str | None:
    """Return what DeepGEMM's products need and this machine lacks, or None. capability: the device's (None: a CPU)."""
    if capability is None or capability[0] != HOPPER[0]:  # on later GPUs DeepGEMM scales otherwise than our formula
        return "Hopper GPU (compute capability 9.0)"
    return None if installed else "DeepGEMM (the package sgl-deep-gemm)"


@contextlib.contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Run another implementation inside the block: for tests and benchmarks that compare the two."""
    previous = dispatch.installed()
    _install(implementation)
    try:
        yield
    finally:
        dispatch.install(previous)


def _install(implementation: Implementation) -> None:
    if implementation == "torch":
        dispatch.install(None)
    else:
        from fp8rl.numerics.kernels.kernels import KERNELS  # Triton is imported where its kernels run, and nowhere else

        dispatch.install(KERNELS)


# Environment variables of every process that multiplies: ranks of a trainer, engines.

BOUNDED_MEMORY = {
    # oneDNN keeps a kernel of about a megabyte for every shape of a product, 1,024 of them if it is not told otherwise.
    # The shapes of the demo's steps have room; making a new one takes longer than a small product.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"
}
