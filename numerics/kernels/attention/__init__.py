"""Attention over contiguous rows, rows end to end and a paged cache, with its gradients."""
