"""What stands in a spec's way beside the machine: its model, data and sizes, by the checks that a run begins with."""

from __future__ import annotations

from dataclasses import replace

from diagnose.doctor.judge import Diagnosis, Remark
from numerics.errors import UserError
from rl.experiment import Experiment


def with_conditions(diagnosis: Diagnosis, experiment: Experiment) -> Diagnosis:
    """`diagnosis` with the first of them. They need the libraries, so nothing is added where those are the obstacle."""
    if not diagnosis.ok:
        return diagnosis
    from rl.experiment.preconditions import check

    try:
        check(experiment)
    except UserError as error:
        said = (error.key, error.found, error.expected, error.remedy)
        remark = Remark(True, *(said if error.key else ("spec", str(error), "one that a run accepts", "Correct it.")))
        return replace(diagnosis, remarks=(remark, *diagnosis.remarks))
    return diagnosis
