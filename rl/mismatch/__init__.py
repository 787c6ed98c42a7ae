"""How far trainer and engine disagree on the tokens that the engine sampled, and on the experts that they went to."""

from rl.mismatch.breakdown import token_versions
from rl.mismatch.drift import drift_metrics
from rl.mismatch.logprobs import agreement, row_abs_diff_means
from rl.mismatch.redraw import redraw_metrics
from rl.mismatch.routing import router_agreement

__all__ = ["agreement", "drift_metrics", "redraw_metrics", "router_agreement", "row_abs_diff_means", "token_versions"]
