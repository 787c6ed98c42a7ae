"""The `fp8rl` command."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from numerics.errors import UserError
from rl.run.lifecycle.interrupts import INTERRUPTED, end_on_signal, interruptible

app = typer.Typer(
    help="FP8 reinforcement learning for Mixture-of-Experts models: one quantization spec for training and rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEMO_SPEC = Path("examples/arithmetic.yaml")

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="YAML experiment spec.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace the spec's, e.g. run.steps=2.")
]


@app.command()
def train(
    spec: SpecPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of this name first.")] = False,
) -> None:
    """Run an experiment: start or join Ray, train, and write runs/NAME with metrics, checkpoints and a report."""
    with _user_errors():
        _train(spec, overrides or [], resume=resume, overwrite=overwrite)


@app.command()
def submit(
    spec: SpecPath,
    address: Annotated[str, typer.Option(help="Of the cluster's dashboard, e.g. http://127.0.0.1:8265.")],
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show what the job says, and end with it.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of this name first.")] = False,
) -> None:
    """Run an experiment as a job of a Ray cluster, whose nodes see this directory.

    Exit code 0, 1 if the job that was waited for did not succeed, 2 for bad input.
    """
    with _user_errors():
        from rl.experiment import load_experiment
        from rl.run.cluster import submission

        load_experiment(spec, overrides or [])  # what it would refuse, it refuses here
        flags = ["--resume"] * resume + ["--overwrite"] * overwrite
        arguments = [str(spec.absolute()), *(overrides or []), *flags]
        done = submission.submit(arguments, address, wait=wait, say=Console(highlight=False, soft_wrap=True).print)
    if not done:
        raise typer.Exit(1)


@app.command()
def demo(overrides: Overrides = None) -> None:
    """Train the tiny MoE of the examples in exact FP8 on this machine, and say what came of it.

    It replaces an earlier runs/demo.
    """
    with _user_errors():
        if not DEMO_SPEC.is_file():
            raise UserError(f"demo: found no {DEMO_SPEC} here, expected the repository's root. Change there.")
        _train(DEMO_SPEC, ["run.name=demo", *(overrides or [])], overwrite=True)


@app.command()
def preflight(
    spec: SpecPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out BF16/BF16, which needs another engine.")] = False,
) -> None:
    """Start both sides once and say whether they agree: same spec, same bytes, same logprobs.

    Exit code 0, 1 if they do not, 2 for bad input.
    """
    with _user_errors(), redirect_stdout(sys.stderr):
        from diagnose.preflight import preflight as examine
        from diagnose.preflight import rendered
        from rl.experiment import load_experiment

        progress = Console(stderr=True, highlight=False)
        with interruptible():
            found = examine(load_experiment(spec, overrides or []), quick=quick, say=progress.print)
    if as_json:
        print(found.to_json())
    else:
        Console(highlight=False).print(rendered(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def study(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Of the studies.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Run all of them.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, for a look; no verdicts.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Repetitions; by default what a verdict needs.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Copy results into docs/studies; needs a clean tree.")] = False,
) -> None:
    """Measure what is claimed about FP8, and write runs/studies/NAME with results, tables and figures.

    Exit code 0, 1 if a control does not hold, 2 for bad input.
    """
    with _user_errors(), redirect_stdout(sys.stderr):
        from studies.harness.run import run_studies

        progress = Console(stderr=True, highlight=False)
        with interruptible():
            sound = run_studies(names or [], every=every, quick=quick, seeds=seeds, keep=keep, say=progress.print)
    if not sound:
        raise typer.Exit(1)


@app.command()
def audit(
    spec: SpecPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
) -> None:
    """Start both sides, watch one training step op by op, and say whether every tensor is in its planned format.

    Exit code 0, 1 if one is not, 2 for bad input.
    """
    with _user_errors(), redirect_stdout(sys.stderr):
        from diagnose.audit import audit as examine
        from diagnose.audit import rendered
        from rl.experiment import load_experiment

        progress = Console(stderr=True, highlight=False)
        with interruptible():
            found = examine(load_experiment(spec, overrides or []), say=progress.print)
    if as_json:
        print(found.to_json())
    else:
        Console(highlight=False).print(rendered(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="YAML experiment spec; without one, the default numerics.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON, and nothing else.")] = False,
) -> None:
    """Say what is installed, what the GPUs can do, and on what the spec would run.

    Exit code 0, 1 if it cannot run here, 2 for bad input.
    """
    with _user_errors():
        from diagnose.doctor import gather, judge, rendered, to_json, with_conditions
        from rl.experiment import load_experiment
        from rl.experiment.sections import NumericsSection

        loaded = load_experiment(spec, overrides or []) if spec else None
        numerics = loaded.numerics_config() if loaded else NumericsSection().config(tp=1)
        progress = Console(stderr=True, highlight=False)
        diagnosis = judge(gather(numerics, progress.print), numerics)
        if loaded:
            progress.print("checking model, data and sizes of the spec")
            diagnosis = with_conditions(diagnosis, loaded)
    if as_json:
        print(to_json(diagnosis))
    else:
        Console(highlight=False).print(rendered(diagnosis))
    if not diagnosis.ok:
        raise typer.Exit(1)


@app.command()
def plan(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="SPEC|MODEL", help="YAML spec, Hugging Face directory, or a name: qwen3_30b_a3b."),
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="h100, h200, h800, h20 or b200.")] = "h100",
    gpus: Annotated[int | None, typer.Option(help="Of the trainer; engines share them, or have others.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a row; else as long as they may be.")] = None,
    assume: Annotated[
        str | None, typer.Option(help="Some of recompute, offload, sleep, bf16_moments, with commas.")
    ] = None,
    bench: Annotated[Path | None, typer.Option(help="gpu.json of `python -m bench.gpu` on such a GPU.")] = None,
    claims: Annotated[bool, typer.Option("--claims", help="What calculation says to published claims.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and nothing else.")] = False,
) -> None:
    """Calculate from the configuration alone what fits, how long a step takes, and whether FP8 pays.

    Exit code 0, 1 if it does not fit or settings conflict, 2 for bad input.
    """
    with _user_errors():
        from diagnose import plan as planning

        if claims:
            print(planning.claims_json()) if as_json else Console(highlight=False).print(planning.rendered_claims())
            return
        found, kind = planning.read_subject(subject, overrides or []), planning.gpu_named(gpu)
        mode = found.experiment.numerics.mode
        efficiency = planning.measured(bench, mode, kind) if bench else planning.assumed(mode)
        made = planning.make_plan(found, kind, efficiency, gpus, length, planning.read_assumed(assume))
    if as_json:
        print(planning.to_json(made))
    else:
        Console(highlight=False).print(planning.rendered(made))
    if not made.ok:
        raise typer.Exit(1)


@app.command()
def attribute(
    subject: Annotated[Path, typer.Argument(metavar="RUN|CAPSULE", help="E.g. runs/demo, runs/demo/capsules/step_7.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Page to write; its numbers go beside it as .json.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out causes that need other engines.")] = False,
) -> None:
    """Start both sides and say where their mismatch comes from: by op, by cause, by expert and by position."""
    with _user_errors(), redirect_stdout(sys.stderr):
        from diagnose.attribution.offline import attribute_offline, read_subject
        from diagnose.attribution.page import write_page
        from diagnose.attribution.tables import rendered
        from numerics.io.files import check_writable

        progress = Console(stderr=True, highlight=False)
        named = read_subject(subject)
        page = out or named.page
        check_writable(page, "--out" if out else "report")
        if page.is_dir():
            raise UserError(f"--out: found the directory {page}, expected a page to write. Add its name.")
        with interruptible():
            found = attribute_offline(named, quick=quick, say=progress.print)
        write_page(found, named.name, page, named.compared)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        Console(highlight=False).print(rendered(found, named.compared), f"\nreport   {page}", soft_wrap=True)
        if quick and named.numerics.mode == "native":
            Console(highlight=False).print("left out  quantization and op definitions (--quick)")


@app.command()
def serve(
    subject: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="E.g. runs/demo, or a Hugging Face directory.")],
    port: Annotated[int | None, typer.Option(min=1024, max=65535, help="Without one, any free one.")] = None,
    mode: Annotated[str, typer.Option(help="Of a MODEL: exact or native.")] = "exact",
    preset: Annotated[str, typer.Option(help="Of a MODEL: quantization preset.")] = "fp8_block_pow2",
) -> None:
    """Serve a trained model by OpenAI's API, in the numerics of its run, until Ctrl-C.

    It listens on this machine alone. Log-probabilities are those that the trainer would give.
    """
    with _user_errors():
        if mode not in ("exact", "native"):
            raise UserError(f"--mode: found {mode!r}, expected exact or native. Correct it.")
        from fp8rl import serve as serving

        served = serving.read_served(subject, "exact" if mode == "exact" else "native", preset)
        say = Console(highlight=False, soft_wrap=True).print
        say(f"starting an engine with {served.path}, {served.numerics.mode}, {served.numerics.rollout_spec.digest()}")
        with interruptible(), tempfile.TemporaryDirectory(prefix="fp8rl-serve-") as folder:
            with serving.serve(served, Path(folder) / "engine.log", port) as server:
                at = server.endpoint
                say(f"export OPENAI_BASE_URL={at.url}/v1 OPENAI_API_KEY={at.api_key}    # model {served.name}")
                while True:
                    server.check()
                    time.sleep(1.0)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, e.g. runs/demo.")]) -> None:
    """Write the run's report.html: a self-contained page with curves, verdict, sample rollouts and the spec."""
    with _user_errors():
        from rl.report.report import write_report

        with interruptible():
            page, damage = write_report(run)
        Console(highlight=False).print(str(page), soft_wrap=True)
    for line in damage:
        print(f"damaged: {line}", file=sys.stderr)


@app.command()
def convert(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face directory in BF16.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write, as an engine loads it.")],
    preset: Annotated[str, typer.Option(help="Quantization preset.")] = "fp8_block_pow2",
) -> None:
    """Quantize a checkpoint with the project's one quantizer."""
    with _user_errors():
        from models.stored import check_stored
        from numerics.io.files import check_writable
        from numerics.io.reading import check_path
        from numerics.spec import QuantSpec
        from rl.experiment.preconditions import read_model
        from rl.experiment.preconditions.tokenizer import check_chat_template, load_tokenizer
        from trainer.config import TrainerConfig
        from trainer.megatron.model_checks import check_layout
        from weight_sync.hf_checkpoint import convert_checkpoint

        check_path(model, "MODEL")
        quant_spec = QuantSpec.preset(preset)
        definition = read_model(model, "MODEL")
        check_layout(definition.sizes, TrainerConfig(), quant_spec)
        check_stored(model, definition, "MODEL")
        if (model / "tokenizer.json").is_file():  # an engine needs none, and a base model no chat template
            tokenizer = load_tokenizer(model, "MODEL")
            if tokenizer.chat_template:
                check_chat_template(tokenizer, model, "MODEL")
        check_writable(out, "OUT")
        if os.path.lexists(out):
            raise UserError(f"OUT: found {out}, expected a directory that does not exist yet. Choose another one.")
        with interruptible():
            convert_checkpoint(model, out, quant_spec)
        Console(highlight=False).print(f"{out}: quantized as {preset}, spec {quant_spec.digest()}", soft_wrap=True)


@app.command()
def rescore(
    capsule: Annotated[Path, typer.Argument(metavar="CAPSULE", help="Directory, e.g. runs/demo/capsules/step_7.")],
    model: Annotated[Path | None, typer.Option(help="Weights in place of the capsule's own, in BF16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a capsule's sequences again, without Ray and engine. Exit code 0: reproduced, 1: not, 2: bad input."""
    with _user_errors():
        from diagnose.rescore import print_rescored
        from diagnose.rescore import rescore as score_again

        result = score_again(capsule, model)
        if as_json:
            print(json.dumps(result.to_dict(), indent=1))
        else:
            print_rescored(result, Console(highlight=False))
    if not result.reproduced:
        raise typer.Exit(1)


def _train(path: Path, overrides: list[str], *, resume: bool = False, overwrite: bool = False) -> None:
    # The imports below take seconds.
    print(f"fp8rl: checking {path}", flush=True)
    from numerics.io.files import write_atomically
    from rl.experiment import load_experiment
    from rl.experiment.preconditions import check
    from rl.record.run_dir import open_run_dir

    experiment = load_experiment(path, overrides)
    check(experiment, lambda text: print(f"note: {text}", flush=True))
    chosen = {"resume": resume, "overwrite": overwrite}
    with interruptible(), open_run_dir(experiment.run.dir, experiment.run.name, **chosen) as files:
        from rl.loop import train as run_loop
        from rl.run.checkpoints import changes, check_resumable
        from rl.run.lifecycle.attempts import FAILURES, attempted
        from rl.run.lifecycle.stopping import STOPPED, how_to_go_on, say_failed

        if resume:
            check_resumable(files, experiment)
            for change in changes(files, experiment):
                print(f"resuming with {change}")
        write_atomically(files.experiment, experiment.to_yaml())
        try:
            stopped = attempted(experiment, files, run_loop)
        except KeyboardInterrupt:
            print(how_to_go_on(files), file=sys.stderr)
            raise
        except FAILURES as error:
            say_failed(files, error)
            raise typer.Exit(STOPPED) from None
    if stopped:
        raise typer.Exit(STOPPED)


@contextmanager
def _user_errors() -> Iterator[None]:
    """What the user can mend is one message and exit code 2; Ctrl-C is 130; anything else keeps its traceback."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted; every process that was started is stopped", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def main() -> None:
    """The entry point."""
    end_on_signal()
    for stream in (sys.stdout, sys.stderr):  # a name of a file may hold what the terminal's encoding does not
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
