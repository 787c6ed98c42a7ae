"""The modules of a Megatron layer, under TransformerEngine's parameter names in both numerics modes.

In exact mode a layer runs its program (`program`), by a `host` and the products of `exact`. `native` has Megatron's
modules, and only its FP8 products are the shared ones.
"""
