"""Before anything: what is installed, what the GPUs can do, and where the two sides of a spec would run."""

from rl.doctor.conditions import with_conditions
from rl.doctor.judge import Diagnosis, judge
from rl.doctor.machine import Machine, gather
from rl.doctor.page import rendered, to_json

__all__ = ["Diagnosis", "Machine", "gather", "judge", "rendered", "to_json", "with_conditions"]
