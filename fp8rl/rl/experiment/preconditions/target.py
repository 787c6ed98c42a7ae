"""The machines that a run is for. A plan is for GPUs that nobody has yet."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fp8rl.numerics.backend.cuda_toolkit import other_compilers
from fp8rl.numerics.backend.implementation import capability_of, expandable_segments, has_deepgemm
from fp8rl.trainer.device import has_transformer_engine


@dataclass(frozen=True)
class Target:
    """The machines that a run is for."""

    gpus: bool
    """They have some."""
    transformer_engine: bool
    """It is installed there; so is `deepgemm`."""
    deepgemm: bool = True
    capability: tuple[int, int] | None = None
    """Compute capability of the GPUs; None: nobody knows it here."""
    expandable_segments: str | None = None
    """The setting of torch's allocator that asks for them there."""
    other_compilers: str | None = None
    """CUDA's compilers there, or `none`, where none is of the release that torch is built for; None: one is."""
    known: bool = True
    """False for a cluster that is not ours, whose machines are looked at when the run is placed on them."""

    @property
    def named(self) -> str:
        """The GPUs, as messages name them."""
        return f"on GPUs of compute capability {dotted(self.capability or ())}"

    @classmethod
    def here(cls) -> Target:
        """Return this machine; where RAY_ADDRESS names a cluster, as far as it tells of that."""
        gpus, known = torch.cuda.is_available(), "RAY_ADDRESS" not in os.environ
        capability = capability_of("cuda") if gpus and known else None
        compilers = other_compilers(torch.version.cuda) if gpus and known and torch.version.cuda else None
        return cls(gpus, has_transformer_engine(), has_deepgemm(), capability, expandable_segments(), compilers, known)


def dotted(capability: tuple[int, ...]) -> str:
    """Write a compute capability as messages do, e.g. `9.0`."""
    return ".".join(map(str, capability))
