"""The doctor says what is installed, what the GPUs can do, and where the two sides of a spec would run."""

from diagnose.doctor.conditions import with_conditions
from diagnose.doctor.judge import Diagnosis, judge
from diagnose.doctor.machine import Machine, gather
from diagnose.doctor.page import rendered

__all__ = ["Diagnosis", "Machine", "gather", "judge", "rendered", "with_conditions"]
