"""Builds Megatron's model, and makes the changes that it needs in Megatron and TransformerEngine."""
