"""The planner calculates, before there is a machine, what a spec takes in bytes and time, and whether FP8 pays."""

from fp8rl.diagnose.plan.efficiency import Efficiency, assumed, measured
from fp8rl.diagnose.plan.plan import Plan, fitted_plan, make_plan
from fp8rl.diagnose.plan.plan_report import rendered
from fp8rl.diagnose.plan.subject import read_subject
from fp8rl.rl.experiment.budget.job import GPUS, gpu_named

__all__ = [
    "GPUS",
    "Efficiency",
    "Plan",
    "assumed",
    "fitted_plan",
    "gpu_named",
    "make_plan",
    "measured",
    "read_subject",
    "rendered",
]
