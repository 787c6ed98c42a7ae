"""Megatron's model and settings, and what lets Megatron and TransformerEngine run here."""
