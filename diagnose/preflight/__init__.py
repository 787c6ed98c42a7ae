"""The preflight starts both sides once and says whether they agree: same spec, same bytes, same log-probabilities."""

from diagnose.preflight.report import PreflightReport, rendered
from diagnose.preflight.run import preflight

__all__ = ["PreflightReport", "preflight", "rendered"]
