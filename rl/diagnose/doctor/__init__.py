"""Before anything: what is installed, what the GPUs can do, and where the two sides of a spec would run."""

from rl.diagnose.doctor.conditions import with_conditions
from rl.diagnose.doctor.judge import Diagnosis, judge
from rl.diagnose.doctor.machine import Machine, gather
from rl.diagnose.doctor.page import rendered, to_json

__all__ = ["Diagnosis", "Machine", "gather", "judge", "rendered", "to_json", "with_conditions"]
