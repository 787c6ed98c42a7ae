"""The trainer's side of the families of ops: a file for each family, with the same name as in `models.families`.

A file says which keywords a family adds to Megatron's config, which modules it gives a layer, how to read the results
of its ops from calls of these modules, and which formats differ from the precision map. A user's own family brings its
trainer side along (`Family.megatron`).
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
from fp8rl.models.program import ADD_NORM, EMBED, LINEAR, LOGPROBS, NORM, OpForm
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.errors import user_error
from fp8rl.trainer.modules.precision import LayerPrecision

Library = Literal["exact", "megatron", "transformer_engine"]
"""The library of a layer's modules: ours, which call the shared ops (`exact`), Megatron, or TransformerEngine."""
Fields = Mapping[str, Any]
"""Some fields of Megatron's TransformerLayerSubmodules."""
Call = tuple[Any, tuple[Any, ...], Any]
"""A call of a module for one sequence, in Megatron's shapes: the module, its arguments, and what it returned."""


@dataclass(frozen=True)
class LayerModules:
    """The modules of a library that all families use."""

    norm: type[nn.Module]
    norm_column_linear: Callable[[str], ModuleSpec]
    """Returns, for a module kind, a norm and the column-parallel product behind it."""
    column_linear: Callable[[str | None], ModuleSpec]
    row_linear: Callable[[str], ModuleSpec]
    activation: type[nn.Module] | None = None
    """The activation of an MLP; None: the SwiGLU inside Megatron's MLP."""


@dataclass(frozen=True)
class Layer:
    """What a family needs to know of the layer to build its modules."""

    sizes: ModelSizes
    modules: LayerModules
    precision: LayerPrecision


@dataclass(frozen=True)
class MegatronSide:
    """How to read one form of op from the modules of Megatron's layer."""

    writes: Callable[[Call], tuple[Tensor, ...]]
    """Returns the op's outputs, each [S, ...], from a call of its module."""
    each: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] | None = None
    """Returns each expert's term of each token's sum, [S, k, H]. Arguments: the module, probabilities, chosen experts,
    and the output rows [S * k, H] of the module's `experts`, sorted by expert, then token. None for other forms."""
    constants: Callable[[GPTModel, nn.Module], tuple[float, ...]] | None = None
    """Returns the values of the form's constants from the model and the module."""


@dataclass(frozen=True, kw_only=True)
class MegatronFamily:
    """The trainer's side of one family of ops."""

    sides: Mapping[OpForm, MegatronSide]
    """The side of each of the family's forms of op."""
    layer: Mapping[Library, Callable[[Layer], Fields]] = field(default_factory=dict)
    """For each library that can compute the family: returns its fields of a layer, with the norm before it."""
    config: Callable[[ModelSizes], Mapping[str, Any]] = lambda sizes: {}
    """Returns the keywords that the family adds to Megatron's config."""
    config_type: type[TransformerConfig] | None = None
    """The class of Megatron's config, if the family needs another one than TransformerConfig."""
    own_formats: Callable[[ModelSizes, Mode], Mapping[str, str]] = lambda sizes, mode: MappingProxyType({})
    """Returns the formats of the family's ops that differ from the precision map, by key of the map."""


def megatron_family(family: Family) -> MegatronFamily:
    """Return the trainer's side of a family."""
    if family.megatron is not None:
        return family.megatron()  # type: ignore[no-any-return]
    return import_module(f"{__name__}.{family.name}").FAMILY  # type: ignore[no-any-return]


def megatron_families(model: Model) -> list[MegatronFamily]:
    """Return the trainer's side of each family that occurs in a model's layers."""
    sizes, found = model.sizes, model.architecture.families
    return [megatron_family(each) for each in found if any(each.within(sizes, n) for n in range(sizes.layers))]


def sides(model: Model) -> dict[OpForm, MegatronSide]:
    """Return the trainer's side of every form of op in a model."""
    return ENDS | {form: side for family in megatron_families(model) for form, side in family.sides.items()}


def fields_of_layer(families: Iterable[Family], layer: Layer, library: Library) -> dict[str, Any]:
    """Return the fields that a layer's families give it. Raises UserError: a family has no modules of this library."""
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
    """Return a function that returns the spec of a `module` with this precision for a module kind."""
    return lambda kind: ModuleSpec(module=module, params={"precision": precision, "kind": kind})


def output(call: Call) -> tuple[Tensor, ...]:
    """Return the module's output, without a bias beside it."""
    returned = call[2]
    return (rows_of(returned[0] if isinstance(returned, tuple) else returned),)


def rows_of(tensor: Tensor) -> Tensor:
    """Return the tokens [S, ...] of a sequence from Megatron's tensor [S, 1, ...] or its logits [1, S, V]."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor.squeeze(1)


def epsilon(model: GPTModel, _: nn.Module) -> tuple[float, ...]:
    """Return the epsilon of the model's norms."""
    return (model.config.layernorm_epsilon,)


def normed(call: Call) -> tuple[Tensor, ...]:
    """Return the output of a norm, also of a norm inside a product's module."""
    module, given, _ = call
    # Inside a linear module it is taken again, as the module need not let it out of one kernel.
    return (rows_of(module.normalized(given[0])),) if hasattr(module, "normalized") else output(call)


def product(call: Call) -> tuple[Tensor, ...]:
    """Return the output of a product. A router's product is its `gating`."""
    module, given, _ = call
    return (rows_of(module.gating(given[0])),) if hasattr(module, "gating") else output(call)


ENDS = {
    EMBED: MegatronSide(output),
    NORM: MegatronSide(normed, constants=epsilon),
    ADD_NORM: MegatronSide(lambda call: (*normed(call), rows_of(call[1][0])), constants=epsilon),
    LINEAR: MegatronSide(product),
    LOGPROBS: MegatronSide(output),  # no module: the loss computes them behind the model
}
"""The sides of the forms that all models have: embedding, norms, products, and log-probabilities after the head."""
