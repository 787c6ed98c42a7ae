"""Registers the parameters that a rank of an engine has, and finds the parameters of each op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.shared_base import engine_parameters
from fp8rl.models.tensors import EngineRank
from fp8rl.numerics.spec import QuantSpec

Key = tuple[int | None, str]
"""The layer and the name of an op."""


@dataclass(frozen=True)
class Product:
    """The matrices of an op, end to end in one parameter."""

    weight: nn.Parameter
    counts: list[int]
    """The number of rows of each matrix on this rank."""
    row_parallel: bool
    """True if ranks split the columns. Each rank then computes a part of every sum."""
    bias: nn.Parameter | None = None


@dataclass(frozen=True)
class OpWeights:
    """The parameters of each op."""

    products: dict[Key, Product]
    stacks: dict[Key, list[nn.Parameter]]
    """The two stacks of an op's routed experts, [experts, N, K]: gate and up in one stack, then down."""
    tensors: dict[Key, dict[str, Tensor]]
    """All other tensors, by the last part of their names, or by `""` for an op's only tensor."""

    @classmethod
    def of(cls, model: nn.Module, definition: Model, rank: EngineRank) -> OpWeights:
        found = cls({}, {}, {})
        for name, by_index in definition.tensors.in_engine.items():
            rows = next(iter(by_index.values()))
            row, key, last = rows[0], (rows[0].layer, rows[0].op), name.rpartition(".")[2]
            if row.adapts is not None:
                continue
            parameter = model.get_parameter(name)
            if None not in by_index:
                found.stacks.setdefault(key, []).append(parameter)
            elif last == "bias" and key in found.products:
                found.products[key] = replace(found.products[key], bias=parameter)
            else:
                if row.product:
                    counts = [rank.rows(matrix) for matrix in rows]
                    found.products[key] = Product(parameter, counts, row.engine.split == 1)
                tensors = found.tensors.setdefault(key, {})
                tensors[last] = parameter
                if not row.product or "" not in tensors:  # an op may have a norm in addition to its product
                    tensors[""] = parameter
            if row.copies:  # the embedding is the head's matrix too
                found.products[None, "lm_head"] = Product(parameter, [len(parameter)], False)
        return found


def hold(model: nn.Module, definition: Model, spec: QuantSpec, rank: EngineRank) -> None:
    """Register a rank's parameters, as zeros, under their names in the tensor table."""
    for name, (shape, dtype) in engine_parameters(definition, spec, rank).items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        zeros: Any = torch.zeros(shape, dtype=dtype)  # rows that pad a vocabulary stay zeros
        module.register_parameter(last, nn.Parameter(zeros, requires_grad=False))
