"""Commands that diagnose: doctor and plan before a run, explain after it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from fp8rl.commands import AsJson, Overrides, finish, progress, show, user_errors
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.run.interrupts import interruptible


def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="YAML experiment spec; without one, the default numerics.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Start nothing: skip the test of the ops and the comparison of both sides.")
    ] = False,
) -> None:
    """Check the installation, the GPUs and the spec, then start both sides once and compare them.

    It shows the data, the first prompt and its rewards. Trainer and engine must agree on spec, bytes, log-probabilities
    and the format of every tensor.

    Exit codes: 0 all is well, 1 it cannot run here or something differs, 2 bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        from fp8rl.diagnose.doctor import examine

        with interruptible():
            found = examine(spec, overrides or [], quick=quick, say=progress())
    finish(found, as_json)


def warm(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="List of kernels that a run or doctor wrote beside Triton's cache.")
    ],
    gpu: Annotated[
        str | None, typer.Option(help="A GPU's name, as in `plan`. Default: the GPU of this machine, else h100.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a list of Triton kernels, so that a run on another machine compiles none. This needs no GPU.

    TRITON_CACHE_DIR names the cache, which can be carried to machines with the same Triton.

    Exit codes: 0 success, 2 bad input.
    """
    with user_errors():
        from fp8rl.numerics.backend.implementation import implementation_for
        from fp8rl.numerics.kernels import cache
        from fp8rl.numerics.spec import QuantSpec
        from fp8rl.rl.experiment.budget.job import gpu_named
        from fp8rl.rl.run.cluster.nodes import own_capability

        capability = (own_capability() or (9, 0)) if gpu is None else gpu_named(gpu).capability
        if implementation_for(capability, QuantSpec.preset("fp8_block_pow2")) != "triton":
            raise user_error("--gpu", found=gpu, expected="a GPU that runs our kernels", remedy="Name h100 or b200.")
        variants = cache.read_list(file)
        cache.relocate()
        found = cache.compile_all(variants, capability, len(os.sched_getaffinity(0)), progress())
    counts = {"directory": str(cache.directory()), "kernels": len(variants), "compiled": len(found.compiled)}
    if as_json:
        print(json.dumps(counts))
    else:
        show("{kernels} kernels in {directory}; {compiled} were compiled now".format(**counts))


def plan(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="SPEC|MODEL", help="YAML spec, Hugging Face directory, or a name: qwen3_30b_a3b."),
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[
        str, typer.Option(help="h100, h200, h800, h20, b200, b300, l40s, 4090, 'rtx pro 6000' or a100.")
    ] = "h100",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs for the trainer; engines may share them.")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a row; by default the maximum.")] = None,
    bench: Annotated[Path | None, typer.Option(help="gpu.json of `python -m lab.bench.gpu` on such a GPU.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Find keys with which it fits, and print them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Calculate what fits on which GPUs, and with --bench the least time of a step. It starts nothing.

    Exit codes: 0 it fits, 1 it does not fit or settings conflict, 2 bad input.
    """
    with user_errors():
        from fp8rl.diagnose.plan import fitted_plan, make_plan
        from fp8rl.diagnose.plan.plan_report import reported
        from fp8rl.diagnose.plan.subject import read_plan_subject
        from fp8rl.rl.experiment.budget.job import gpu_named

        if fit:
            made = fitted_plan(subject, overrides or [], gpu_named(gpu), gpus, length, bench)
        else:
            made = make_plan(read_plan_subject(subject, overrides or []), gpu_named(gpu), gpus, length, bench)
    finish(reported(made), as_json)


def explain(
    subject: Annotated[
        Path | None,
        typer.Argument(metavar="RUN|CAPSULE", help="E.g. runs/demo/capsules/step_7; without one, the newest run."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="BF16 weights to use instead of a capsule's own.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only score a capsule again, without Ray or an engine.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say where trainer and engine differ, and why: score a capsule again, start both sides, compare them op by op.

    Exit codes: 0 nothing differs, 1 something does, 2 bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        from fp8rl.diagnose.explain import explain as examine
        from fp8rl.diagnose.subject import newest_run, read_subject

        given = read_subject(subject or newest_run(Path("runs")), model)
        with interruptible():
            found = examine(given, quick=quick, say=progress())
    finish(found, as_json)


def certify_elsewhere(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[DUMP | --server URL]")] = None,
) -> None:
    """Test an engine, or judge a dump of log-probabilities. This needs fp8rl-certify, which is not installed here."""
    with user_errors():
        raise user_error(
            "fp8rl certify",
            found="no fp8rl-certify in this environment",
            expected="the package fp8rl-certify, which has the command",
            remedy="Install it: pip install ./certify in a checkout.",
        )
