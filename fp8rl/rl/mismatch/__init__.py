"""Metrics of how far trainer and engine disagree on the tokens that the engine sampled, and on the experts that they
went to."""
