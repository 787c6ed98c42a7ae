"""The `fp8rl` command."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from numerics.errors import UserError
from rl.interrupts import interruptible

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
def demo(overrides: Overrides = None) -> None:
    """Train the tiny MoE of the examples in exact FP8 on this machine, and say what came of it."""
    with _user_errors():
        if not DEMO_SPEC.is_file():
            raise UserError(f"demo: found no {DEMO_SPEC} here, expected the repository's root. Change there.")
        _train(DEMO_SPEC, ["run.name=demo", *(overrides or [])], overwrite=True)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, e.g. runs/demo.")]) -> None:
    """Write the run's report.html: a self-contained page with curves, verdict, sample rollouts and the spec."""
    with _user_errors():
        from rl.report import write_report

        Console(highlight=False).print(str(write_report(run)), soft_wrap=True)


@app.command()
def convert(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face directory in BF16.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write, as an engine loads it.")],
    preset: Annotated[str, typer.Option(help="Quantization preset.")] = "fp8_block_pow2",
) -> None:
    """Quantize a checkpoint with the project's one quantizer."""
    with _user_errors():
        from numerics.spec import QuantSpec
        from rl.preconditions import read_model
        from trainer.config import TrainerConfig
        from trainer.hf_config import check_layout
        from weight_sync.hf_checkpoint import convert_checkpoint

        quant_spec = QuantSpec.preset(preset)
        check_layout(read_model(model, "MODEL"), TrainerConfig(), quant_spec)
        if out.exists():
            raise UserError(f"OUT: found {out}, expected a directory that does not exist yet. Choose another one.")
        convert_checkpoint(model, out, quant_spec)


def _train(path: Path, overrides: list[str], *, resume: bool = False, overwrite: bool = False) -> None:
    # The imports below take seconds.
    print(f"fp8rl: checking {path}", flush=True)
    from rl.preconditions import check
    from rl.run_dir import create_run_dir, write_spec
    from rl.spec import load_spec

    spec = load_spec(path, overrides)
    check(spec)
    run = create_run_dir(spec.run.dir, spec.run.name, resume=resume, overwrite=overwrite)

    from rl.checkpoints import check_resumable
    from rl.ending import finish
    from rl.loop import train as run_loop
    from rl.stack import Stack

    with interruptible():
        try:
            if resume:
                check_resumable(run, spec)
            write_spec(run, spec.to_dict())
            stack = Stack.open(spec, run)
        except UserError:
            if not resume:
                shutil.rmtree(run.path)
            raise
        with stack:
            run_loop(stack)
            finish(stack)


@contextmanager
def _user_errors() -> Iterator[None]:
    """What the user can mend is one message and exit code 2; Ctrl-C is 130; anything else keeps its traceback."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted; every process of the run was stopped", file=sys.stderr)
        raise typer.Exit(130) from None
