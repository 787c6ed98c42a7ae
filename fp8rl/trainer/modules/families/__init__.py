"""Families of ops in native mode: a file for each, with the same name as in `models.families`.

A file says which keywords a family adds to Megatron's config, which of its modules it gives a layer, and which formats
differ from the precision map. Exact mode needs only the formats (`trainer.modules.program`). A user's family needs no
such file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import nn

from fp8rl.models.architecture import Model
from fp8rl.models.families import Family, families_of_layer
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.errors import user_error
from fp8rl.trainer.modules.precision import LayerPrecision

Library = Literal["megatron", "transformer_engine"]
"""The library of a layer's modules."""
Fields = Mapping[str, Any]
"""Some fields of Megatron's TransformerLayerSubmodules."""


@dataclass(frozen=True)
class LayerModules:
    """The modules of a library that all families use."""

    norm: type[nn.Module]
    norm_column_linear: Callable[[str], ModuleSpec]
    """Returns, for a module kind, a norm and the column-parallel product after it."""
    column_linear: Callable[[str], ModuleSpec]
    row_linear: Callable[[str], ModuleSpec]


@dataclass(frozen=True)
class Layer:
    """What a family needs to know of the layer to build its modules."""

    sizes: ModelSizes
    modules: LayerModules
    precision: LayerPrecision


@dataclass(frozen=True, kw_only=True)
class MegatronFamily:
    """One family of ops in Megatron."""

    layer: Mapping[Library, Callable[[Layer], Fields]] = field(default_factory=dict)
    """For each library that can compute the family: returns its fields of a layer, with the norm before it."""
    config: Callable[[ModelSizes], Mapping[str, Any]] = lambda sizes: {}
    """Returns the keywords that the family adds to Megatron's config."""
    config_type: type[TransformerConfig] | None = None
    """The class of Megatron's config, if the family needs another one than TransformerConfig."""
    own_formats: Callable[[ModelSizes, Mode], Mapping[str, str]] = lambda sizes, mode: MappingProxyType({})
    """Returns the formats of the family's ops that differ from the precision map, by key of the map."""


def megatron_family(family: Family) -> MegatronFamily:
    """Return Megatron's side of a family; an empty one if the family has no file here."""
    if family.name not in {module.name for module in pkgutil.iter_modules(__path__)}:
        return MegatronFamily()
    return import_module(f"{__name__}.{family.name}").FAMILY  # type: ignore[no-any-return]


def megatron_families(model: Model) -> list[MegatronFamily]:
    """Return Megatron's side of each family that occurs in a model's layers."""
    sizes, families = model.sizes, model.architecture.families
    used = [family for family in families if any(family.within(sizes, n) for n in range(sizes.layers))]
    return [megatron_family(family) for family in used]


def fields_of_layer(families: Iterable[Family], layer: Layer, library: Library) -> dict[str, Any]:
    """Return a layer's fields from all of its families. Raises UserError: a family has no modules of this library."""
    found: dict[str, Any] = {}
    for family in families_of_layer(families, layer.sizes, layer.precision.layer):
        builds = megatron_family(family).layer
        if library not in builds:
            found_mode = f"native, on {library}, with a model of {family.name} {family.part}"
            expected = "exact: the family has no modules of Megatron's"
            raise user_error("numerics.mode", found_mode, expected, "Set numerics.mode=exact.")
        found |= builds[library](layer)
    return found


def with_precision(precision: LayerPrecision, module: type[nn.Module]) -> Callable[[str], ModuleSpec]:
    """Return a function that returns the spec of a `module` with this precision for a module kind."""
    return lambda kind: ModuleSpec(module=module, params={"precision": precision, "kind": kind})
