"""Metrics of how far trainer and engine disagree on the tokens that the engine sampled, and on the experts that they
went to."""

from fp8rl.rl.mismatch.drift import drift_metrics, redraw_metrics, router_agreement
from fp8rl.rl.mismatch.logprobs import agreement, row_abs_diff_means, token_versions

__all__ = ["agreement", "drift_metrics", "redraw_metrics", "router_agreement", "row_abs_diff_means", "token_versions"]
