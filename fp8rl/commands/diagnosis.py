"""Commands that diagnose: doctor, plan, preflight and audit before a run, attribute, rescore and certify after it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fp8rl.commands import AsJson, Overrides, SpecPath, end, progress, refuse_given, show, user_errors
from fp8rl.commands.completions import complete_models
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.run.interrupts import interruptible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fp8rl.diagnose.certify.dump.dump_report import DumpReport

_SERVER, _DUMP = "A server", "A dump"
Preset = Literal["bf16", "fp8_block_pow2", "fp8_block_fp32", "mxfp8", "ironwood"]


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
        from fp8rl.diagnose.doctor import judge
        from fp8rl.diagnose.doctor.doctor_report import rendered
        from fp8rl.diagnose.doctor.machine import gather
        from fp8rl.rl.experiment import load_experiment
        from fp8rl.rl.experiment.fetching import fetched
        from fp8rl.rl.experiment.sections import NumericsSection
        from fp8rl.rl.run.cluster.placement import own_capability
        from fp8rl.rl.run.kernels import warm_once

        loaded = fetched(load_experiment(spec, overrides or [])) if spec else None
        numerics = loaded.numerics_config() if loaded else NumericsSection().config(tp=1)
        say = progress()
        if not quick:
            warm_once(None, own_capability(), say)
        diagnosis = judge(gather(numerics, say, quick=quick), numerics)
        if loaded:
            say("checking model, data and sizes of the spec")
            if all(each.found != "not installed" for each in diagnosis.remarks if each.blocks):
                from fp8rl.diagnose.doctor.conditions import with_conditions

                diagnosis = with_conditions(diagnosis, loaded)
    print(diagnosis.to_json()) if as_json else show(rendered(diagnosis))
    end(diagnosis.ok)


def warm(
    context: typer.Context,
    subject: Annotated[Path, typer.Argument(metavar="SPEC|RUN|MODEL", help="YAML spec, or the directory to serve.")],
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="A name that `plan` knows. Default: the GPU of this machine, else h100.")
    ] = None,
    mode: Annotated[Literal["exact", "native"], typer.Option(help="For a MODEL: exact or native.")] = "exact",
    preset: Annotated[Preset, typer.Option(help="For a MODEL: quantization preset.")] = "fp8_block_pow2",
    as_json: AsJson = False,
) -> None:
    """Compile the Triton kernels of a run, or of `fp8rl serve`, before it starts. This needs no GPU.

    TRITON_CACHE_DIR names the cache, which can be carried to machines with the same Triton.

    Exit code 0, 2 for bad input.
    """
    with user_errors():
        from fp8rl.diagnose.subject import read_served
        from fp8rl.rl.experiment import load_experiment
        from fp8rl.rl.experiment.budget.gpus import gpu_named
        from fp8rl.rl.experiment.fetching import fetched
        from fp8rl.rl.run.cluster.placement import own_capability
        from fp8rl.rl.run.kernels import Subject
        from fp8rl.rl.run.kernels import warm as compile_kernels

        if not os.path.isdir(subject) or os.path.isfile(subject / "spec.yaml"):
            refuse_given(context, ["mode", "preset"], "a spec or a run, which has its own")
        capability = (own_capability() or (9, 0)) if gpu is None else gpu_named(gpu).capability
        if subject.is_dir():
            if overrides:
                raise user_error(
                    "KEY=VALUE", found=overrides, expected="none beside a directory", remedy="Leave it out."
                )
            launched: Subject = read_served(subject, mode, preset).launched
        else:
            launched = fetched(load_experiment(subject, overrides or []))
        found = compile_kernels(launched, capability, progress())
    if as_json:
        print(json.dumps(None if found is None else asdict(found)))
    elif found is None:
        show("nothing to compile: it runs no kernels of ours on such GPUs")
    else:
        later = f"; ops of {', '.join(found.unknown)} are compiled when they first run" if found.unknown else ""
        show(f"{found.kernels} kernels in {found.directory}, of which {found.compiled} were compiled now{later}")


def plan(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="SPEC|MODEL",
            help="YAML spec, Hugging Face directory, or a name: qwen3_30b_a3b.",
            autocompletion=complete_models,
        ),
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[
        str, typer.Option(help="h100, h200, h800, h20, b200, b300, l40s, 4090, 'rtx pro 6000' or a100.")
    ] = "h100",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="The trainer's GPUs; engines share them or have others.")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a row; by default the maximum.")] = None,
    bench: Annotated[Path | None, typer.Option(help="gpu.json of `python -m lab.bench.gpu` on such a GPU.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Find keys with which it fits, and print them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Calculate what fits on which GPUs, and with --bench how long a step takes at least. It starts nothing.

    Exit code 0, 1 if it does not fit or settings conflict, 2 for bad input.
    """
    with user_errors():
        from fp8rl.diagnose.plan import fitted_plan, make_plan
        from fp8rl.diagnose.plan.plan_report import rendered
        from fp8rl.diagnose.plan.subject import read_plan_subject
        from fp8rl.rl.experiment.budget.gpus import gpu_named

        if fit:
            made = fitted_plan(subject, overrides or [], gpu_named(gpu), gpus, length, bench)
        else:
            made = make_plan(read_plan_subject(subject, overrides or []), gpu_named(gpu), gpus, length, bench)
    print(made.to_json()) if as_json else show(rendered(made))
    end(made.ok)


def preflight(
    spec: SpecPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the run with BF16 on both sides, which needs another engine.")
    ] = False,
) -> None:
    """Start both sides once and say whether they agree: same spec, same bytes, same logprobs.

    Exit code 0, 1 if they do not, 2 for bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        from fp8rl.diagnose.preflight import preflight as examine
        from fp8rl.diagnose.preflight import rendered
        from fp8rl.rl.experiment import load_experiment
        from fp8rl.rl.experiment.fetching import fetched

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
        from fp8rl.diagnose.audit.audit_report import rendered
        from fp8rl.rl.experiment import load_experiment
        from fp8rl.rl.experiment.fetching import fetched

        with interruptible():
            found = examine(fetched(load_experiment(spec, overrides or [])), say=progress())
    print(found.to_json()) if as_json else show(rendered(found))
    end(found.ok)


def attribute(
    subject: Annotated[Path, typer.Argument(metavar="RUN|CAPSULE", help="E.g. runs/demo, runs/demo/capsules/step_7.")],
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Page to write; its numbers are written beside it as .json.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip causes that need further engines.")] = False,
) -> None:
    """Start both sides and find out where their mismatch comes from: by op, by cause, by expert and by position."""
    with user_errors(), redirect_stdout(sys.stderr):
        from fp8rl.diagnose import attribution
        from fp8rl.diagnose.attribution.attribution_report import is_attribution, rendered, write_page
        from fp8rl.diagnose.subject import read_subject
        from fp8rl.numerics.core.files import check_page, writing

        given = read_subject(subject, "attribute")
        page, key = out or attribution.page_of(given), "--out" if out else "report"
        check_page(page, key)
        check_page(page.with_suffix(".json"), key, is_attribution)
        with interruptible():
            found = attribution.attribute_offline(given, quick=quick, say=progress())
        compared = attribution.compared(given)
        with writing(page, key):
            write_page(found, given.name, page, compared)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        return
    show(rendered(found, compared), f"\nreport   {page}", soft_wrap=True)
    if quick and given.numerics.mode == "native":
        show("left out  quantization and op definitions (--quick)")


def rescore(
    capsule: Annotated[Path, typer.Argument(metavar="CAPSULE", help="Directory, e.g. runs/demo/capsules/step_7.")],
    model: Annotated[Path | None, typer.Option(help="BF16 weights to use instead of the capsule's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score the sequences of a capsule again, which a gate has kept, without Ray or an engine.

    Exit code 0: reproduced, 1: not, 2: bad input.
    """
    with user_errors():
        from fp8rl.diagnose.rescore import print_rescored
        from fp8rl.diagnose.rescore import rescore as score_again
        from fp8rl.rl.record.console import PlainConsole

        result = score_again(capsule, model)
        if as_json:
            print(json.dumps(result.to_dict(), indent=1))
        else:
            print_rescored(result, PlainConsole())
    end(result.reproduced)


def certify(
    context: typer.Context,
    dump: Annotated[
        Path | None,
        typer.Argument(metavar="[DUMP]", help="Token ids and log-probabilities: JSON lines, a run, slime's, verl's."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For a server, its name of the model; for a dump, the directory of the weights."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            help="Address of a running server, e.g. http://127.0.0.1:30000; with /v1, OpenAI's API.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="FP8RL_API_KEY", help="Key of the server.", rich_help_panel=_SERVER)
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=5.0, help="Limit for all requests; what does not fit is skipped.", rich_help_panel=_SERVER),
    ] = 300.0,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=100.0, help="For rows without their own; by default 1.", rich_help_panel=_DUMP),
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-6, max=1.0, help="Likewise.", rich_help_panel=_DUMP)] = None,
    top_k: Annotated[int | None, typer.Option(min=-1, max=2**31 - 1, help="Likewise.", rich_help_panel=_DUMP)] = None,
    min_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Likewise.", rich_help_panel=_DUMP)] = None,
    preset: Annotated[
        Preset, typer.Option(help="Quantization in which our ops score it, beside BF16.", rich_help_panel=_DUMP)
    ] = "fp8_block_pow2",
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to score, evenly over the rows.", rich_help_panel=_DUMP)
    ] = 50_000,
    page: Annotated[
        Path | None, typer.Option(help="Path of the page; by default beside the dump.", rich_help_panel=_DUMP)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test whether an engine is exact; or how far a dump's log-probabilities are from the model's, and on which side.

    A server gets the same requests alone, in batches, from the cache, in other chunks, under load. A dump is
    scored by the model's own code and by our ops.

    Exit code 0: certified, equal or within the floor, 1: not, 2: bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        if (server is None) == (dump is None):
            raise user_error(
                "DUMP, --server",
                found="neither" if dump is None else "both",
                expected="one of them",
                remedy="Give a file, or --server URL.",
            )
        if server is not None:
            of_dumps = ["temperature", "top_p", "top_k", "min_p", "preset", "tokens", "page"]
            refuse_given(context, of_dumps, "--server, as it is for a dump")
        else:
            refuse_given(context, ["seconds", "api_key"], "a dump, as it is for a server")
        with interruptible():
            if server is not None:
                from fp8rl.diagnose import certify as servers

                found = servers.certify_server(server, model, api_key, seconds=seconds, say=progress())
                text, shown, ok = found.to_json(), servers.rendered(found), found.ok
            else:
                assert dump is not None
                sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
                report, shown = _certify_dump(dump, model, sampling, preset, tokens, page)
                text, ok = report.to_json(), report.ok
    print(text) if as_json else show(shown, soft_wrap=True)
    end(ok)


def _certify_dump(
    dump: Path,
    model: str | None,
    sampling: Mapping[str, Any],
    preset: Preset,
    tokens: int,
    page: Path | None,
) -> tuple[DumpReport, RenderableType]:
    """Certify a dump, write its page, and return the report and its text.

    sampling: settings for rows without their own; None: as the dump has them.
    """
    from fp8rl.diagnose.certify import dump as dumps
    from fp8rl.diagnose.certify.dump.dump_report import rendered, write_page
    from fp8rl.diagnose.certify.dump.rows import Sampling
    from fp8rl.models.hub import model_directory
    from fp8rl.numerics.core.files import check_page, writing
    from fp8rl.numerics.core.reading import check_path

    check_path(dump, "DUMP")
    page = page or (dump / "certify.html" if dump.is_dir() else dump.with_suffix(".certify.html"))
    check_page(page, "--page")
    said = partial(Sampling.replaced, **sampling)
    weights = None if model is None else model_directory(model, None, "--model")
    report = dumps.certify_dump(dump, weights, sampling=said, preset=preset, budget=tokens, say=progress())
    with writing(page, "--page"):
        write_page(report, page)
    progress()(f"page     {page}")
    return report, rendered(report)
