"""Megatron's own modules: with TransformerEngine's products where it runs, and without it with emulated FP8 products.

TransformerEngine has no CPU kernels. There the FP8 product is that of `numerics.ops` with the spec's scales, and
everything else is Megatron's. Nothing but the place of the router's probabilities is aligned with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.megatron.lowering import Lowering
from fp8rl.trainer.modules.layer import LayerModules
from fp8rl.trainer.modules.native import provider
from fp8rl.trainer.modules.precision import LayerPrecision


def layer_modules(sizes: ModelSizes, lowering: Lowering) -> Callable[[LayerPrecision], LayerModules]:
    """The modules of a layer, by its precision."""
    if not lowering.transformer_engine:
        return partial(provider.layer_modules, sizes)
    from fp8rl.trainer.modules.native import te_provider  # needs TransformerEngine

    return partial(te_provider.layer_modules, sizes)


__all__ = ["layer_modules"]
