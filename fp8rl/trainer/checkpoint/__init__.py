"""Checkpoints of a trainer: whole or absent, on any layout."""
