"""The modules of a Megatron layer, under TransformerEngine's parameter names in both numerics modes.

`exact` computes every op as `numerics.ops` defines it; `native` computes with Megatron's own ops, and only the FP8
products are the shared ones. Both have what all families of ops need; the rest is in `families`, a file for each.
"""
