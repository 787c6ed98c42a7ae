"""Native mode: builds layers from Megatron's own modules, with TransformerEngine's products on a GPU.

TransformerEngine has no CPU kernels. On a CPU, `numerics.ops` computes FP8 products, and Megatron all other ops. Two
things are changed: the router's probabilities are applied where the engine applies them, and on CPUs without AVX-512
`numerics.ops` also computes the products of BF16 weights.

Each other file here describes families of `models.families`: the keywords that a family adds to Megatron's config, and
the modules that it gives to a layer. A user's own family has no such file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor, nn

from fp8rl.models.architecture import Model
from fp8rl.models.families import Family
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics import ops
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.ops.linear import multiplies_bf16
from fp8rl.trainer.modules import exact
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import norm_parameter, tag_split

Fields = Mapping[str, Any]
"""Some fields of Megatron's TransformerLayerSubmodules."""


@dataclass(frozen=True)
class LayerModules:
    """The modules that all families use, from one library."""

    norm: type[nn.Module]
    norm_column_linear: Callable[[str], ModuleSpec]
    """Returns a norm with the column-parallel product after it, for the product's module kind."""
    column_linear: Callable[[str], ModuleSpec]
    row_linear: Callable[[str], ModuleSpec]
    provider: Any = None
    """Megatron's provider of TransformerEngine's modules (`TESpecProvider`). None: the library is Megatron itself."""


@dataclass(frozen=True)
class Layer:
    """What a family needs to know about a layer to build the layer's modules."""

    definition: Model
    modules: LayerModules
    precision: LayerPrecision


@dataclass(frozen=True, kw_only=True)
class MegatronFamily:
    """How Megatron builds one family of ops."""

    layer: Callable[[Layer], Fields]
    """Returns the fields of a layer that the family fills, with the norm before the family's modules."""
    config: Callable[[ModelSizes], Mapping[str, Any]] = lambda sizes: {}
    """Returns the keywords that the family adds to Megatron's config."""
    config_type: type[TransformerConfig] | None = None
    """The class of Megatron's config if the family needs another class than TransformerConfig."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Formats in which the family differs from the precision map, by the keys of the map."""


def megatron_family(family: Family) -> MegatronFamily:
    """Return how Megatron builds a family. Raises UserError: native mode does not have the family."""
    files = [import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    known: dict[str, MegatronFamily] = {name: each for file in files for name, each in file.FAMILIES.items()}
    if family.name not in known:
        found = f"native, on megatron, with a model of {family.name} {family.part}"
        expected = "exact, because native mode has no modules for this family"
        raise user_error("numerics.mode", found, expected, "Set numerics.mode=exact.")
    return known[family.name]


def megatron_families(model: Model) -> list[MegatronFamily]:
    """Return how Megatron builds each family of a model. Raises UserError as `megatron_family` does."""
    sizes, found = model.sizes, model.architecture.families
    return [megatron_family(each) for each in found if any(each.within(sizes, n) for n in range(sizes.layers))]


def fields_of_layer(layer: Layer) -> dict[str, Any]:
    """Return the fields that the families of a layer fill."""
    found: dict[str, Any] = {}
    for family in layer.definition.families[layer.precision.layer]:
        found |= megatron_family(family).layer(layer)
    return found


# Modules that all families use.


def layer_modules(precision: LayerPrecision) -> LayerModules:
    """Return the modules of a layer without TransformerEngine."""
    return LayerModules(
        norm=RMSNorm,
        norm_column_linear=with_precision(precision, NormColumnLinear),
        column_linear=with_precision(precision, ColumnLinear),
        row_linear=with_precision(precision, RowLinear),
    )


def transformer_engine_modules(precision: LayerPrecision) -> LayerModules:
    """Return TransformerEngine's modules of a layer.

    Megatron runs each layer in an FP8 context that it makes from the model's config. The context quantizes products.
    """
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # needs TransformerEngine

    provider = TESpecProvider()
    norm_column_linear = ModuleSpec(module=provider.column_parallel_layer_norm_linear())
    column_linear = ModuleSpec(module=provider.column_parallel_linear())
    row_linear = ModuleSpec(module=provider.row_parallel_linear())
    return LayerModules(
        norm=provider.layer_norm(rms_norm=True),
        norm_column_linear=lambda kind: norm_column_linear,
        column_linear=lambda kind: column_linear,
        row_linear=lambda kind: row_linear,
        provider=provider,
    )


def with_precision(precision: LayerPrecision, module: type[nn.Module]) -> Callable[[str], ModuleSpec]:
    """Return a function that makes the spec of a `module` with this precision, for the module kind it is given."""
    return lambda kind: ModuleSpec(module=module, params={"precision": precision, "kind": kind})


class RMSNorm(exact.RMSNorm):
    """torch's RMSNorm over the last axis. Megatron's own wrapper of it refuses sequence parallelism."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Apply torch's RMSNorm over the last axis. zero_centered: multiply by 1 + weight, not by weight."""
    return F.rms_norm(x, weight.shape, (1 + weight.float()).to(weight.dtype) if zero_centered else weight, eps)


# Megatron's column- and row-parallel linear layers, with a local product of ours where the spec or the CPU wants it.


def own_product(precision: LayerPrecision, kind: str | None, device: torch.device) -> Callable[..., Tensor] | None:
    """Return our function of x [..., K] and a weight [N, K] that computes their product. None: the library computes it.

    Without AVX-512 torch's products of BF16 matrices are plain loops: a training step took 4.9 times as long.
    """
    if precision.quantizes(kind):
        return precision.fp8_linear
    return None if multiplies_bf16(device.type) else ops.linear


class ColumnLinear(ColumnParallelLinear):
    """A product whose output features are split over the tensor-parallel ranks."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind
        tag_split(self.weight, 0)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **context: Any) -> Tensor:
        own = own_product(self.precision, self.kind, input.device)
        if own is None:
            return super()._forward_impl(input, weight, *args, **context)
        if context["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=context["tp_group"]
            )
        product = own(input, weight)
        return product if self.bias is None else product + self.bias


class NormColumnLinear(ColumnLinear):
    """RMSNorm, then a column-parallel product. It has the parameter names of TransformerEngine's LayerNormLinear."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = norm_parameter(self.config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, N] with the bias in it, None)"""
        how = self.config.layernorm_epsilon, self.config.layernorm_zero_centered_gamma
        return super().forward(rms_norm(input_, self.layer_norm_weight, *how), *args, **kwargs)


class RowLinear(RowParallelLinear):
    """A product whose input features are split over the tensor-parallel ranks. Megatron sums in the model's dtype."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind
        tag_split(self.weight, 1)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **context: Any) -> Tensor:
        own = own_product(self.precision, self.kind, input.device)
        return super()._forward_impl(input, weight, *args, **context) if own is None else own(input, weight)
