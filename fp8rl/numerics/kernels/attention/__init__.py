"""Attention over contiguous rows, rows end to end, prefix trees and a paged cache, with its gradients."""
