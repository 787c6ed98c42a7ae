"""Commands that take a model: serve, eval and convert."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from fp8rl.commands import ArchitectureFile, AsJson, Overrides, progress, refuse_given, show, user_errors
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.interrupts import interruptible


def serve(
    context: typer.Context,
    subject: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="E.g. runs/demo, or a Hugging Face directory.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines too.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1024, max=65535, help="By default any free port.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="FP8RL_API_KEY", help="Key that clients must send; by default a new one.")
    ] = None,
    mode: Annotated[str, typer.Option(help="For a MODEL: exact or native.")] = "exact",
    preset: Annotated[str, typer.Option(help="For a MODEL: quantization preset.")] = "fp8_block_pow2",
    tool_parser: Annotated[
        str | None, typer.Option(help="Format in which the model calls tools, as SGLang names it; a run has its own.")
    ] = None,
    architecture: ArchitectureFile = None,
) -> None:
    """Serve a trained model with OpenAI's API, in the numerics of its run, until Ctrl-C.

    Its log-probabilities equal the trainer's in exact mode. By default only programs on this machine can connect.
    """
    with user_errors():
        if mode not in ("exact", "native"):
            raise UserError(f"--mode: found {mode!r}, expected exact or native. Correct it.")
        if os.path.isfile(subject / "spec.yaml"):
            refuse_given(context, ["mode", "preset", "architecture"], "a run, which is served as it was trained")
        from fp8rl import serving
        from fp8rl.diagnose.subject import read_served

        serving.check_open(host, api_key)
        own = None if architecture is None else str(architecture.absolute())
        served = read_served(subject, "exact" if mode == "exact" else "native", preset, own)
        if tool_parser is not None:
            served = served.with_tools(tool_parser)
        digest = served.numerics.rollout_spec.digest()
        path, mode = served.experiment.model.path, served.numerics.mode
        show(f"starting an engine with {path} in {mode} mode, quantization spec {digest}")
        with interruptible(), tempfile.TemporaryDirectory(prefix="fp8rl-serve-") as folder:
            with serving.serve(served, Path(folder) / "engine.log", progress(), port, host, api_key) as server:
                url, key = server.endpoint.url, shlex.quote(server.endpoint.api_key)
                if api_key is not None and api_key == os.environ.get("FP8RL_API_KEY"):
                    key = '"$FP8RL_API_KEY"'  # a log of what is printed then has no secret
                models = ", or without its adapter ".join(filter(None, [served.name, served.base_name]))
                show(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}    # model {models}")
                while True:
                    server.check()
                    time.sleep(1.0)


def eval(
    subject: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="E.g. runs/demo, or a Hugging Face directory.")],
    overrides: Overrides = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="Data file instead of the run's own sets, or an entry of `eval.sets` in YAML."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on held-out problems, in the numerics and with the rewards of its run.

    A MODEL needs --set. Keys such as rewards=[{function: math}] say how it is prompted and judged.
    """
    with user_errors():
        import json

        from rich.table import Table

        from fp8rl import evaluating

        served = evaluating.read_evaluated(subject, sets or [], overrides or [])
        with interruptible(), tempfile.TemporaryDirectory(prefix="fp8rl-eval-") as folder:
            found = evaluating.evaluate(served, Path(folder) / "engine.log", progress())
        if as_json:
            print(json.dumps(found))
            return
        table = Table("metric", "value")
        for name, value in found.items():
            table.add_row(name, f"{value:.4g}")
        show(table)


def convert(
    context: typer.Context,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Hugging Face directory in BF16, or in FP8 by blocks.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write, which an engine can load.")],
    preset: Annotated[str, typer.Option(help="Quantization preset; bf16 quantizes nothing.")] = "fp8_block_pow2",
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter in PEFT's format, e.g. runs/NAME/adapter, to merge first.")
    ] = None,
    architecture: ArchitectureFile = None,
    pad: Annotated[
        bool | None,
        typer.Option(
            "--pad/--unpad",
            help="Quantize nothing. --pad: fill widths up to whole blocks of 128 with zeros, for training in FP8. "
            "--unpad: remove these zeros.",
        ),
    ] = None,
) -> None:
    """Quantize a checkpoint for an engine, or pad its widths to whole blocks of 128."""
    with user_errors():
        from fp8rl.serving import convert_model, pad_model

        if pad is not None:
            refuse_given(context, ["preset"], "--pad or --unpad, which quantizes nothing")
            if adapter is not None:
                raise UserError(
                    "--adapter: found --pad or --unpad beside it, expected neither. Merge the adapter first: "
                    "fp8rl convert MODEL MERGED --preset bf16 --adapter ADAPTER."
                )
            with interruptible():
                changed = pad_model(model, out, pad, architecture)
            widths = ", ".join(f"{name} = {value}" for name, value in changed.items() if value is not None)
            show(f"{out}: {'padded to' if pad else 'without padding:'} {widths}")
            return

        def note(text: str) -> None:
            show(f"note: {text}")

        with interruptible():
            spec = convert_model(model, out, preset, adapter, architecture, note)
        merged = f" with {adapter}" if adapter else ""
        show(f"{out}: quantized{merged} as {preset}, quantization spec {spec.digest()}")
