"""Products of matrices, in FP8 and BF16, of one weight or of experts."""
