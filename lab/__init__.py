"""The laboratory: studies of what is claimed about FP8, and benchmarks. It is in the checkout alone, not installed."""
