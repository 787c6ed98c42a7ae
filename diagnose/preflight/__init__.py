"""Before a run: do the two sides agree? Starts both once, measures, and says so for each of the three agreements."""

from diagnose.preflight.report import Report, rendered
from diagnose.preflight.run import preflight

__all__ = ["Report", "preflight", "rendered"]
