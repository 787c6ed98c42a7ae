"""The command that certifies: a running engine, or what an engine has said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp8rl.commands.shared import AsJson, end, progress, show, user_errors
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.run.interrupts import interruptible

if TYPE_CHECKING:
    from fp8rl.diagnose.certify.dump.rows import Sampling

_SERVER, _DUMP = "A server", "A dump"
Preset = Literal["bf16", "fp8_block_pow2", "fp8_block_fp32", "mxfp8", "ironwood"]


def certify(
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
    top_k: Annotated[int | None, typer.Option(min=-1, help="Likewise.", rich_help_panel=_DUMP)] = None,
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
    """Test whether an engine is exact, or how far a dump's log-probabilities are from the model, on which side and why.

    A server gets the same requests alone, in batches, from the cache, in other chunks, under load. A dump is
    scored by the model's own code and by our ops. Exit code 0: certified, equal or within the floor, 1: not, 2: bad
    input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        if (server is None) == (dump is None):
            raise user_error(
                "DUMP, --server",
                found="neither" if dump is None else "both",
                expected="one of them",
                remedy="Give a file, or --server URL.",
            )
        with interruptible():
            if server is not None:
                from fp8rl.diagnose.certify import certify_server, rendered

                found = certify_server(server, model, api_key, seconds=seconds, say=progress())
                text, shown, ok = found.to_json(), rendered(found), found.ok
            else:
                assert dump is not None
                from fp8rl.diagnose.certify import dump as dumps
                from fp8rl.models.hub import model_directory
                from fp8rl.numerics.core.files import check_page, writing
                from fp8rl.numerics.core.reading import check_path

                check_path(dump, "DUMP")
                written = page or _beside(dump)
                check_page(written, "--page")
                sampling = _sampling(temperature, top_p, top_k, min_p)
                weights = None if model is None else model_directory(model, None, "--model")
                report = dumps.certify_dump(
                    dump, weights, sampling=sampling, preset=preset, budget=tokens, say=progress()
                )
                with writing(written, "--page"):
                    dumps.write_page(report, written)
                progress()(f"page     {written}")
                text, shown, ok = report.to_json(), dumps.rendered(report), report.ok
    print(text) if as_json else show(shown, soft_wrap=True)
    end(ok)


def _beside(dump: Path) -> Path:
    """`x.certify.html` beside a file `x.jsonl`; in a run's folder, `certify.html`."""
    return dump / "certify.html" if dump.is_dir() else dump.with_suffix(".certify.html")


def _sampling(
    temperature: float | None, top_p: float | None, top_k: int | None, min_p: float | None
) -> Callable[[Sampling], Sampling]:
    """Return the change that options make to a dump's sampling."""

    def changed(said: Sampling) -> Sampling:
        cut = said.truncation
        truncation = replace(
            cut,
            top_p=top_p or cut.top_p,
            top_k=cut.top_k if top_k is None else top_k or -1,
            min_p=cut.min_p if min_p is None else min_p,
        )
        return replace(
            said, temperature=said.temperature if temperature is None else temperature, truncation=truncation
        )

    return changed
