"""Metrics of how far trainer and engine disagree: on log-probabilities of sampled tokens, and on experts. The buckets
of metrics are in this file because the registry of metrics needs them without an import of torch."""

OLDEST = 8
"""Tokens of this age and older share one metric, so that an asynchronous run has a bounded number of metrics."""
POSITION_STARTS = (0, 16, 64, 256, 1024, 4096, 16384)
"""First position of each bucket of generated tokens; the last bucket is open. An answer's first token is at 0."""
