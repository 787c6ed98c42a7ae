"""Families of ops in native mode: a file for each, with the same name as in `models.families`.

A file says which keywords a family adds to Megatron's config, which modules it gives a layer, and which of their
formats are others than exact mode's. Exact mode needs none of it (`trainer.modules.program`), and a user's own family
has none.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import nn

from fp8rl.models.architecture import Model
from fp8rl.models.families import Family, families_of_layer
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.core.errors import user_error
from fp8rl.trainer.modules.precision import LayerPrecision

Fields = Mapping[str, Any]
"""Some fields of Megatron's TransformerLayerSubmodules."""


@dataclass(frozen=True)
class LayerModules:
    """The modules of a library that all families use."""

    norm: type[nn.Module]
    norm_column_linear: Callable[[str], ModuleSpec]
    """Returns, for a module kind, a norm and the column-parallel product behind it."""
    column_linear: Callable[[str], ModuleSpec]
    row_linear: Callable[[str], ModuleSpec]
    provider: Any = None
    """TransformerEngine's modules, as Megatron names them (`TESpecProvider`); None: the library is Megatron itself."""


@dataclass(frozen=True)
class Layer:
    """What a family needs to know of the layer to build its modules."""

    definition: Model
    modules: LayerModules
    precision: LayerPrecision

    @property
    def sizes(self) -> ModelSizes:
        return self.definition.sizes


@dataclass(frozen=True, kw_only=True)
class MegatronFamily:
    """One family of ops in Megatron."""

    layer: Callable[[Layer], Fields]
    """Returns the family's fields of a layer, with the norm before it."""
    config: Callable[[ModelSizes], Mapping[str, Any]] = lambda sizes: {}
    """Returns the keywords that the family adds to Megatron's config."""
    config_type: type[TransformerConfig] | None = None
    """The class of Megatron's config, if the family needs another one than TransformerConfig."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Formats that differ from the precision map, by key of the map."""


def megatron_family(family: Family) -> MegatronFamily:
    """Return a family in Megatron. Raises UserError: there is none."""
    if family.name not in {module.name for module in pkgutil.iter_modules(__path__)}:
        found = f"native with a model of {family.name} {family.part}"
        expected = "exact: the family has no modules of Megatron's"
        raise user_error("numerics.mode", found, expected, "Set numerics.mode=exact.")
    return import_module(f"{__name__}.{family.name}").FAMILY  # type: ignore[no-any-return]


def megatron_families(model: Model) -> list[MegatronFamily]:
    """Return each family of a model's layers in Megatron. Raises UserError as `megatron_family` does."""
    sizes, found = model.sizes, model.architecture.families
    return [megatron_family(each) for each in found if any(each.within(sizes, n) for n in range(sizes.layers))]


def fields_of_layer(layer: Layer) -> dict[str, Any]:
    """Return the fields that a layer's families give it."""
    found: dict[str, Any] = {}
    for family in families_of_layer(layer.definition.architecture.families, layer.sizes, layer.precision.layer):
        found |= megatron_family(family).layer(layer)
    return found


def with_precision(precision: LayerPrecision, module: type[nn.Module]) -> Callable[[str], ModuleSpec]:
    """Return a function that returns the spec of a `module` with this precision for a module kind."""
    return lambda kind: ModuleSpec(module=module, params={"precision": precision, "kind": kind})
