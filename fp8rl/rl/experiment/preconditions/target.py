"""The machines that a run is for, and what a spec asks of them. A plan is for GPUs that nobody has yet."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fp8rl.models import ModelSizes
from fp8rl.models.shape import Shape
from fp8rl.numerics.backend.cuda_toolkit import other_compilers
from fp8rl.numerics.backend.implementation import (
    capability_of,
    expandable_segments,
    has_deepgemm,
    implementation_for,
)
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.experiment import Experiment
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

    @classmethod
    def here(cls) -> Target:
        """Return this machine; where RAY_ADDRESS names a cluster, as far as it tells of that."""
        gpus, known = torch.cuda.is_available(), "RAY_ADDRESS" not in os.environ
        capability = capability_of("cuda") if gpus and known else None
        compilers = other_compilers(torch.version.cuda) if gpus and known and torch.version.cuda else None
        return cls(
            gpus,
            has_transformer_engine(),
            has_deepgemm(),
            capability,
            expandable_segments(),
            compilers,
            known,
        )


@dataclass(frozen=True)
class PlannedRun:
    """A spec, the sizes of its model, and the machines that it is for: what the rules are about."""

    experiment: Experiment
    shape: Shape
    target: Target

    @property
    def sizes(self) -> ModelSizes:
        return self.shape.sizes

    @property
    def exact_on(self) -> tuple[int, int] | None:
        """Compute capability of the GPUs that exact mode is to run on; None: nobody knows it, or the mode is native."""
        return self.target.capability if self.experiment.numerics.mode == "exact" else None

    @property
    def native_on(self) -> tuple[int, int] | None:
        """Compute capability of the GPUs that native mode is to run on; else None."""
        return self.target.capability if self.experiment.numerics.mode == "native" else None

    @property
    def has_kernels(self) -> bool:
        """True if exact mode has kernels for these GPUs: the definitions in torch do not run in a CUDA graph."""
        numerics = self.experiment.numerics_config()
        return self.exact_on is None or implementation_for(self.exact_on, numerics.spec) == "triton"

    @property
    def lacking(self) -> list[tuple[str, str]]:
        """The families of the model's ops whose exact kernels do not run on these GPUs, and where they do, in words."""
        return [
            (f"{family.name} {family.part}", f"{dotted(family.kernels[0])} to 11.x: {family.kernels[1]}")
            for family, _ in self.shape.layers_of()
            if self.exact_on and self.has_kernels and family.kernels and self.exact_on < family.kernels[0]
        ]

    @property
    def on_gpus(self) -> str:
        """The GPUs, as messages name them."""
        return f"on GPUs of compute capability {dotted(self.target.capability or ())}"

    @property
    def trains_on_te(self) -> QuantSpec | None:
        """The spec that TransformerEngine is to quantize the trainer's products by, on GPUs that are known; None:
        nothing."""
        spec = self.experiment.numerics_config().trainer_spec
        return spec if self.native_on and self.target.transformer_engine and spec.quantized else None


def dotted(capability: tuple[int, ...]) -> str:
    """Write a compute capability as messages do, e.g. `9.0`."""
    return ".".join(map(str, capability))
