"""The trainer's side of the families of ops (`models.families`), a file for each of the same name.

A file says what Megatron's config is to say of it, which modules a layer has of it, what a call of them shows of its
ops, and which formats are its own. An architecture brings its families; one that is not ours brings its side along
(`Family.megatron`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor, nn

from fp8rl.models.architecture import Model
from fp8rl.models.families import Family, families_of_layer
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.trace import ADD_NORM, EMBED, LINEAR, LOGPROBS, NORM, OpForm
from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.errors import user_error
from fp8rl.trainer.modules.precision import LayerPrecision

Library = Literal["exact", "megatron", "transformer_engine"]
"""The library of a layer's modules: ours, of the shared ops; Megatron's; TransformerEngine's."""
Fields = Mapping[str, Any]
"""Some fields of Megatron's TransformerLayerSubmodules."""
Call = tuple[Any, tuple[Any, ...], Any]
"""A module, what it was given, and what it returned, in Megatron's shapes, for one sequence."""


@dataclass(frozen=True)
class LayerModules:
    """The modules that all families have of a library."""

    norm: type[nn.Module]
    norm_column_linear: Callable[[str], ModuleSpec]
    """Of a module kind, as both below: a norm, and a product whose rows the ranks split."""
    column_linear: Callable[[str | None], ModuleSpec]
    row_linear: Callable[[str], ModuleSpec]
    activation: type[nn.Module] | None = None
    """Of an MLP; None for the SwiGLU inside Megatron's."""


@dataclass(frozen=True)
class Layer:
    """A layer that is to be built."""

    sizes: ModelSizes
    modules: LayerModules
    precision: LayerPrecision


@dataclass(frozen=True)
class MegatronSide:
    """One form of op in Megatron."""

    writes: Callable[[Call], tuple[Tensor, ...]]
    """Returns the op's outputs, [S, ...] each, of a call of its module."""
    each: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] | None = None
    """Returns the addends of each of a token's experts [S, k, H], of the module, probabilities, chosen experts, and the
    rows [S * k, H] that its `experts` put out in the order of experts, then tokens; None for other forms."""
    constants: Callable[[GPTModel, nn.Module], tuple[float, ...]] | None = None
    """Returns the values of the form's constants, of the model and the module."""


@dataclass(frozen=True, kw_only=True)
class MegatronFamily:
    """One family of ops in Megatron."""

    sides: Mapping[OpForm, MegatronSide]
    """Of each of its forms."""
    layer: Mapping[Library, Callable[[Layer], Fields]] = field(default_factory=dict)
    """Its fields of a layer that has it, a norm before it among them, of each library that can compute it."""
    config: Callable[[ModelSizes], Mapping[str, Any]] = lambda sizes: {}
    """Keywords of Megatron's config in a model that has it."""
    config_type: type[TransformerConfig] | None = None
    """The class of that config, if it is another."""
    own_formats: Callable[[ModelSizes, Mode], Mapping[str, str]] = lambda sizes, mode: MappingProxyType({})
    """Formats that its ops have, by key of the precision map, where they are not those of the map."""


def megatron_family(family: Family) -> MegatronFamily:
    """Return the trainer's side of a family."""
    if family.megatron is not None:
        return family.megatron()  # type: ignore[no-any-return]
    return import_module(f"{__name__}.{family.name}").FAMILY  # type: ignore[no-any-return]


def megatron_families(model: Model) -> list[MegatronFamily]:
    """Return the trainer's side of the families that some layer of a model has."""
    sizes, found = model.sizes, model.architecture.families
    return [megatron_family(each) for each in found if any(each.within(sizes, n) for n in range(sizes.layers))]


def sides(model: Model) -> dict[OpForm, MegatronSide]:
    """Return the trainer's side of every form of op in a model."""
    return ENDS | {form: side for family in megatron_families(model) for form, side in family.sides.items()}


def fields_of_layer(families: Iterable[Family], layer: Layer, library: Library) -> dict[str, Any]:
    """Return the fields of a layer, family by family. Raises UserError: a family has no modules of this library."""
    found: dict[str, Any] = {}
    for family in families_of_layer(families, layer.sizes, layer.precision.layer):
        builds = megatron_family(family).layer
        if library not in builds:
            mode = "exact" if library == "exact" else f"native, on {library}"
            expected = f"what the family's modules in the trainer are for: {', '.join(builds) or 'nothing'}"
            remedy = "Set the other mode, or add modules to the family's `MegatronFamily.layer`."
            raise user_error("numerics.mode", f"{mode}, with a model of {family.name} {family.part}", expected, remedy)
        found |= builds[library](layer)
    return found


def with_precision(precision: LayerPrecision, module: type[nn.Module]) -> Callable[[str | None], ModuleSpec]:
    """Return a function that gives the spec of `module` for a module kind. It computes as `precision` says."""
    return lambda kind: ModuleSpec(module=module, params={"precision": precision, "kind": kind})


def output(call: Call) -> tuple[Tensor, ...]:
    """Return the module's output, without a bias beside it."""
    returned = call[2]
    return (rows_of(returned[0] if isinstance(returned, tuple) else returned),)


def rows_of(tensor: Tensor) -> Tensor:
    """Return a sequence's tokens [S, ...] of Megatron's tensors: [S, 1, ...], logits [1, S, V]."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor.squeeze(1)


def epsilon(model: GPTModel, _: nn.Module) -> tuple[float, ...]:
    """Return the constant of norms."""
    return (model.config.layernorm_epsilon,)


def normed(call: Call) -> tuple[Tensor, ...]:
    """Return what a norm puts out."""
    module, given, _ = call
    # Inside a linear module it is taken again, as the module need not let it out of one kernel.
    return (rows_of(module.normalized(given[0])),) if hasattr(module, "normalized") else output(call)


def product(call: Call) -> tuple[Tensor, ...]:
    """Return what a product puts out, that of a router, too."""
    module, given, _ = call
    return (rows_of(module.gating(given[0])),) if hasattr(module, "gating") else output(call)


ENDS = {
    EMBED: MegatronSide(output),
    NORM: MegatronSide(normed, constants=epsilon),
    ADD_NORM: MegatronSide(lambda call: (*normed(call), rows_of(call[1][0])), constants=epsilon),
    LINEAR: MegatronSide(product),
    LOGPROBS: MegatronSide(output),  # no module: the loss computes them behind the model
}
"""Sides of the forms that all models have: embedding, norms, products, and log-probabilities behind the head."""
