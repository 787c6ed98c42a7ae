"""Runs one pass over a batch, from rows to gradients."""
