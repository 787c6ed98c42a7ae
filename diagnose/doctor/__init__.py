"""The doctor says what is installed, what the GPUs can do, and where the two sides of a spec would run."""

from fp8rl.diagnose.doctor.conditions import with_conditions
from fp8rl.diagnose.doctor.judge import Diagnosis, judge
from fp8rl.diagnose.doctor.machine import Machine, gather
from fp8rl.diagnose.doctor.page import rendered

__all__ = ["Diagnosis", "Machine", "gather", "judge", "rendered", "with_conditions"]
