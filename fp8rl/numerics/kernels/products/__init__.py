"""Computes products of matrices in FP8 and BF16, with one weight or with the weights of experts."""
