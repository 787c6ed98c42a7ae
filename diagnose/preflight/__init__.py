"""The preflight starts both sides once and says whether they agree: same spec, same bytes, same log-probabilities."""

from fp8rl.diagnose.preflight.preflight_report import PreflightReport, rendered
from fp8rl.diagnose.preflight.preflight_run import preflight

__all__ = ["PreflightReport", "preflight", "rendered"]
