"""Architectures, one file each: sizes from config.json, their formula, the table of tensors, the ops. Imports numerics.

Trainer, engine plugin, weight sync, converter, preconditions and diagnoses read them; nothing else knows a tensor's
name.
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
from fp8rl.models.sizes import ModelSizes, checked, family_sizes
