"""Megatron's model and settings, and the changes with which Megatron and TransformerEngine run here."""
