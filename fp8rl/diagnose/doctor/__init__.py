"""Answers the question before a run: can this spec run here, and do its two sides compute the same?

It checks the installation, the machine, what a run checks at its start, the memory, and the data. If nothing is wrong,
it starts one trainer and one engine, and compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fp8rl.diagnose.doctor.doctor_report import reported
from fp8rl.diagnose.doctor.judge import judge
from fp8rl.diagnose.doctor.machine import gather
from fp8rl.diagnose.report import Finding, Report
from fp8rl.models import read_shape
from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.experiment.budget.fit import fullest, own_gpu, planned_here
from fp8rl.rl.experiment.budget.job import job_of
from fp8rl.rl.experiment.budget.memory import peak_on_a_cpu
from fp8rl.rl.experiment.contents import fetched
from fp8rl.rl.experiment.sections import NumericsSection


def examine(
    spec: Path | None = None, overrides: Sequence[str] = (), *, quick: bool = False, say: Callable[[str], None] = print
) -> Report:
    """Examine this machine, and a spec on it.

    Args:
        quick: leave out the slow checks: the test of the ops, and the comparison of both sides.
        say: prints each step that begins.

    Raises UserError: there is no such spec, or a key or value of it is wrong.
    """
    experiment = None if spec is None else fetched(load_experiment(spec, overrides))
    numerics = NumericsSection().config(tp=1) if experiment is None else experiment.numerics_config()
    machine = gather(numerics, say, quick=quick)
    diagnosis = judge(machine, numerics)
    lacking = any(each.found == "not installed" and each.grade == "error" for each in diagnosis.findings)
    if experiment is None or lacking:
        return reported(diagnosis, "" if spec is None else str(spec))
    from fp8rl.diagnose.doctor.conditions import with_conditions  # what follows imports libraries that may be missing

    say("checking model, data and sizes of the spec")
    diagnosis = with_conditions(diagnosis, experiment)
    if any(each.grade == "error" for each in diagnosis.findings):
        return reported(diagnosis, str(spec))
    diagnosis = replace(diagnosis, findings=(*diagnosis.findings, memory(experiment)))
    if not quick and experiment.needs_engines:
        from fp8rl.diagnose.doctor.pair import compare

        diagnosis = replace(diagnosis, pair=compare(experiment, say=say))
    return reported(diagnosis, str(spec))


def memory(experiment: Experiment) -> Finding:
    """Say how much memory the fullest of this machine's GPUs needs, or a trainer rank on its CPU."""
    shape = read_shape(experiment.model.directory, adapter=experiment.adapter)
    if (gpu := own_gpu()) is None:
        _, peak = peak_on_a_cpu(job_of(experiment, shape, "torch", gpu_memory=0))
        return Finding("memory", f"a trainer rank takes {peak / 1e9:.1f} GB on a CPU", grade="note")
    peak = fullest(*planned_here(shape, experiment, gpu)).peak
    return Finding("memory", f"{peak / 1e9:.1f} of {gpu.memory / 1e9:.0f} GB on the fullest {gpu.name}", grade="note")
