"""Modules whose arithmetic is that of `numerics.ops`."""

from fp8rl.trainer.modules.exact.provider import layer_modules, use_shared_output

__all__ = ["layer_modules", "use_shared_output"]
