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
from fp8rl.diagnose.doctor.machine import Machine, gather
from fp8rl.diagnose.report import Finding, Report
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import load_experiment
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
    diagnosis = replace(diagnosis, findings=(*diagnosis.findings, *memory(str(spec), overrides, machine)))
    blocked = any(each.grade == "error" for each in diagnosis.findings)
    if not (quick or blocked) and experiment.needs_engines:
        from fp8rl.diagnose.doctor.pair import compare

        diagnosis = replace(diagnosis, pair=compare(experiment, say=say))
    return reported(diagnosis, str(spec))


def memory(spec: str, overrides: Sequence[str], machine: Machine) -> list[Finding]:
    """Return one finding: the memory that a spec takes on this machine's GPUs, or on its CPU."""
    from fp8rl.diagnose.plan import make_plan
    from fp8rl.diagnose.plan.subject import read_plan_subject
    from fp8rl.rl.experiment.budget.job import gpu_named

    try:
        gpu = gpu_named(machine.gpus[0].name if machine.torch_sees else "h100")
        plan = make_plan(read_plan_subject(spec, overrides), gpu)
    except UserError:  # of a GPU that the plan does not know, or of what has been found already
        return []
    if not machine.torch_sees:
        return [Finding("memory", f"a trainer rank takes {plan.on_a_cpu[1] / 1e9:.1f} GB on a CPU", grade="note")]
    size, slack = gpu.memory / 1e9, plan.slack
    found = f"{size - slack / 1e9:.1f} of {size:.0f} GB on the fullest {gpu.name}"
    if slack >= 0:
        return [Finding("memory", found, grade="note")]
    remedy = f"`fp8rl plan {spec} --gpu {gpu.name.lower().replace(' ', '-')} --fit` looks for keys with which it fits."
    return [Finding("memory", found, "a run that fits", remedy, "warning")]
