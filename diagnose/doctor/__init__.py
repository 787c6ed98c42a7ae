"""The doctor says what is installed, what the GPUs can do, and where the two sides of a spec would run."""

from diagnose.doctor.conditions import with_conditions
from diagnose.doctor.judge import Diagnosis, judge
from diagnose.doctor.machine import Machine, gather
from diagnose.doctor.page import rendered, to_json

__all__ = ["Diagnosis", "Machine", "gather", "judge", "rendered", "to_json", "with_conditions"]
