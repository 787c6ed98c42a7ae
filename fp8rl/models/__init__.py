"""Describes architectures, one file each: the sizes from config.json, the table of tensors, and the ops.

Trainer, engine plugin, weight sync, converter, preconditions and diagnoses read these descriptions. No other code
knows a tensor's name. This package imports `numerics` only.
"""

# ruff: noqa: F401
from fp8rl.models.architecture import (
    Architecture,
    Model,
    load_architecture,
    read_model,
    read_shape,
    register,
    text_config,
)
from fp8rl.models.sizes import ModelSizes, family_sizes
