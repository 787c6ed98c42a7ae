"""Architectures, one file each: sizes from config.json, the table of tensors, the ops of the forward. Imports numerics.

Trainer, engine plugin, weight sync, converter, preconditions and attribution read them; nothing else knows a tensor's
name.
"""

from models.architecture import Architecture, Model, read_model, register
from models.sizes import ModelSizes

__all__ = ["Architecture", "Model", "ModelSizes", "read_model", "register"]
