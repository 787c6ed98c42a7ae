"""Gives Megatron the modules of its layers. Parameters have TransformerEngine's names in both numerics modes.

In exact mode a layer runs the model's program (`program`), with a `host` and the products of `exact`. In native mode it
has Megatron's modules (`native`), of which only the FP8 products are the same as in the engine.
"""
