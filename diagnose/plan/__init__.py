"""The planner calculates, before there is a machine, what a spec takes in bytes and time, and whether FP8 pays."""

from diagnose.plan.efficiency import Efficiency, assumed, measured
from diagnose.plan.page import rendered, to_json
from diagnose.plan.plan import Plan, fitted_plan, make_plan
from diagnose.plan.subject import read_subject
from rl.experiment.budget.gpus import GPUS, gpu_named

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
    "to_json",
]
