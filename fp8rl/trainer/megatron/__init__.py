"""Builds Megatron's model, and changes what it needs in Megatron and TransformerEngine."""
