"""What the `sync:` section of an experiment spec may say."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SyncConfig(BaseModel):
    """How weights travel from the trainer to the engines."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    transport: Literal["tensor", "disk"] = "tensor"
    """`tensor`: shared memory on one host; `disk`: safetensors files."""
    bucket_mib: int = Field(default=256, ge=1)
    """Size of one flattened bucket in MiB; a larger tensor gets a bucket of its own."""
