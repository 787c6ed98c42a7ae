"""The modules of a Megatron layer, under TransformerEngine's parameter names in both numerics modes.

`exact` computes every op as `numerics.ops` defines it; `native` computes with Megatron's own ops, and only the FP8
products are the shared ones. What both have in common stands here.
"""
