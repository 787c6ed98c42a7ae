"""The doctor says what is installed, what the GPUs can do, and where the two sides of a spec would run."""

from fp8rl.diagnose.doctor.doctor_report import Diagnosis, rendered
from fp8rl.diagnose.doctor.judge import judge
from fp8rl.diagnose.doctor.machine import Machine, gather

__all__ = ["Diagnosis", "Machine", "gather", "judge", "rendered"]
