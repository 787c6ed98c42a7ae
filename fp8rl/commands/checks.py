"""Commands that examine an experiment before its run: doctor, plan, preflight, audit."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8rl.commands import complete
from fp8rl.commands.shared import AsJson, Overrides, SpecPath, end, progress, show, user_errors
from fp8rl.rl.run.interrupts import interruptible

if TYPE_CHECKING:
    from fp8rl.numerics.config import Mode


def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="YAML experiment spec; without one, the default numerics.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the test of the ops, which is slow.")] = False,
) -> None:
    """Check the installation, the GPUs, and the spec: how it would run, its data, its first prompt and its rewards.

    Exit code 0, 1 if it cannot run here, 2 for bad input.
    """
    with user_errors():
        from fp8rl.diagnose.doctor import gather, judge, rendered
        from fp8rl.rl.experiment import load_experiment
        from fp8rl.rl.experiment.contents import fetched
        from fp8rl.rl.experiment.sections import NumericsSection

        loaded = fetched(load_experiment(spec, overrides or [])) if spec else None
        numerics = loaded.numerics_config() if loaded else NumericsSection().config(tp=1)
        say = progress()
        diagnosis = judge(gather(numerics, say, quick=quick), numerics)
        if loaded:
            say("checking model, data and sizes of the spec")
            if diagnosis.ok:  # the checks need the libraries
                from fp8rl.diagnose.doctor.conditions import with_conditions

                diagnosis = with_conditions(diagnosis, loaded)
    print(diagnosis.to_json()) if as_json else show(rendered(diagnosis))
    end(diagnosis.ok)


def plan(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="SPEC|MODEL",
            help="YAML spec, Hugging Face directory, or a name: qwen3_30b_a3b.",
            autocompletion=complete.models,
        ),
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[
        str, typer.Option(help="h100, h200, h800, h20, b200, b300, l40s, 4090, 'rtx pro 6000' or a100.")
    ] = "h100",
    gpus: Annotated[int | None, typer.Option(help="The trainer's GPUs; engines share them or have others.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a row; by default the maximum.")] = None,
    bench: Annotated[Path | None, typer.Option(help="gpu.json of `python -m lab.bench.gpu` on such a GPU.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Find keys with which it fits, and print them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Calculate from the configuration alone what fits, how long a step takes, and whether FP8 pays.

    Exit code 0, 1 if it does not fit or settings conflict, 2 for bad input.
    """
    with user_errors():
        from fp8rl.diagnose import plan as planning

        kind = planning.gpu_named(gpu)

        def efficiency(mode: Mode) -> planning.Efficiency:
            return planning.measured(bench, mode, kind) if bench else planning.assumed(mode)

        if fit:
            made = planning.fitted_plan(subject, overrides or [], kind, efficiency, gpus, length)
        else:
            found = planning.read_subject(subject, overrides or [])
            made = planning.make_plan(found, kind, efficiency(found.experiment.numerics.mode), gpus, length)
    print(made.to_json()) if as_json else show(planning.rendered(made))
    end(made.ok)


def preflight(
    spec: SpecPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the BF16 floor, which needs another engine.")] = False,
) -> None:
    """Start both sides once and say whether they agree: same spec, same bytes, same logprobs.

    Exit code 0, 1 if they do not, 2 for bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        from fp8rl.diagnose.preflight import preflight as examine
        from fp8rl.diagnose.preflight import rendered
        from fp8rl.rl.experiment import load_experiment
        from fp8rl.rl.experiment.contents import fetched

        with interruptible():
            found = examine(fetched(load_experiment(spec, overrides or [])), quick=quick, say=progress())
    print(found.to_json()) if as_json else show(rendered(found))
    end(found.ok)


def audit(spec: SpecPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Start both sides, watch one training step op by op, and say whether every tensor is in its planned format.

    Exit code 0, 1 if one is not, 2 for bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        from fp8rl.diagnose.audit import audit as examine
        from fp8rl.diagnose.audit import rendered
        from fp8rl.rl.experiment import load_experiment
        from fp8rl.rl.experiment.contents import fetched

        with interruptible():
            found = examine(fetched(load_experiment(spec, overrides or [])), say=progress())
    print(found.to_json()) if as_json else show(rendered(found))
    end(found.ok)
