"""Megatron's own modules, with FP8 products where the spec wants them.

Megatron leaves FP8 to TransformerEngine, which has no CPU kernels, so that here the FP8 product is `numerics.ops`'
emulation with the spec's scales. Nothing else is aligned with the engine.
"""

from trainer.modules.native.provider import layer_modules

__all__ = ["layer_modules"]
