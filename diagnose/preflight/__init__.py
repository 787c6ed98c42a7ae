"""The preflight starts both sides once and says whether they agree: same spec, same bytes, same log-probabilities."""

from fp8rl.diagnose.preflight.report import PreflightReport, rendered
from fp8rl.diagnose.preflight.run import preflight

__all__ = ["PreflightReport", "preflight", "rendered"]
