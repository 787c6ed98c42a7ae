"""What stands in a spec's way beside the machine, by the checks that a run begins with, and what data it has."""

from __future__ import annotations

from dataclasses import replace

from fp8rl.diagnose.doctor.judge import Diagnosis, Remark
from fp8rl.numerics.errors import UserError
from fp8rl.rl.experiment import Experiment


def with_conditions(diagnosis: Diagnosis, experiment: Experiment) -> Diagnosis:
    """Return `diagnosis` with the first obstacle; without one, with the notes of a start and the data that were found.

    The checks need the libraries, so nothing is added where those are the obstacle.
    """
    if not diagnosis.ok:
        return diagnosis
    from fp8rl.diagnose.doctor.data import data_found
    from fp8rl.rl.experiment.preconditions import check

    notes: list[str] = []
    try:
        check(experiment, notes.append)
        return replace(diagnosis, notes=tuple(notes), data=data_found(experiment))
    except UserError as error:
        said = (error.key, error.found, error.expected, error.remedy)
        remark = Remark(True, *(said if error.key else ("spec", str(error), "one that a run accepts", "Correct it.")))
        return replace(diagnosis, remarks=(remark, *diagnosis.remarks))
