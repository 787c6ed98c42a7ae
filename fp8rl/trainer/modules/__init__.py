"""The modules of a Megatron layer, under TransformerEngine's parameter names in both numerics modes.

`exact` computes every op as `numerics.ops` defines it. `native` uses Megatron's own ops, and only its FP8 products are
the shared ones. Both files have the modules that all families of ops need. `families` has a file for each family.
"""
