"""The audit of a run's precision. It starts both sides, watches a step op by op, and holds it against the precision
map."""

from fp8rl.diagnose.audit.audit_report import AuditReport, rendered
from fp8rl.diagnose.audit.audit_run import audit

__all__ = ["AuditReport", "audit", "rendered"]
