"""Megatron modules whose arithmetic is that of `numerics.ops`, under TransformerEngine's parameter names."""
