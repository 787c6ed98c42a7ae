"""Computes attention over contiguous rows, rows end to end, prefix trees and a paged cache, and its gradients."""
