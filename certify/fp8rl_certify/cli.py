"""The command `fp8rl-certify`, which `fp8rl certify` runs, too.

Light to import, as every command of `fp8rl` imports it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fp8rl_certify.errors import UserError, user_error

if TYPE_CHECKING:
    from rich.console import RenderableType

Preset = Literal["bf16", "fp8_block_pow2", "fp8_block_fp32", "mxfp8", "ironwood"]
_SERVER, _DUMP = "A server", "A dump"
_OF_A_DUMP, _OF_A_SERVER = (
    ("temperature", "top_p", "top_k", "min_p", "preset", "tokens", "page"),
    ("seconds", "api_key"),
)
_INTERRUPTED = 130


def certify(
    context: typer.Context,
    dump: Annotated[
        Path | None,
        typer.Argument(metavar="[DUMP]", help="Token ids and log-probabilities: JSON lines, a run, slime's, verl's."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="For a server, its name of the model; for a dump, the directory of the weights.")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Test whether an engine is exact; or how far a dump's log-probabilities are from the model's, and on which side.

    A server gets the same requests alone, in batches, from the cache, in other chunks, under load. A dump is
    scored by the model's own code and by our ops.

    Exit code 0: certified, equal or within the floor, 1: not, 2: bad input.
    """
    with _user_errors(), redirect_stdout(sys.stderr):
        if (server is None) == (dump is None):
            raise user_error(
                "DUMP, --server",
                found="neither" if dump is None else "both",
                expected="one of them",
                remedy="Give a file, or --server URL.",
            )
        if server is not None:
            _refuse_given(context, _OF_A_DUMP, "--server, as it is for a dump")
            text, shown, ok = _server(server, model, api_key, seconds)
        else:
            assert dump is not None
            _refuse_given(context, _OF_A_SERVER, "a dump, as it is for a server")
            sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
            text, shown, ok = _dump(dump, model, sampling, preset, tokens, page)
    print(text) if as_json else _print(shown)
    if not ok:
        raise typer.Exit(1)


def main() -> None:
    """Run the command by itself."""
    typer.run(certify)


def _server(server: str, model: str | None, api_key: str | None, seconds: float) -> tuple[str, RenderableType, bool]:
    """Certify a server. Return the JSON, the text and whether all is well."""
    from fp8rl_certify.server import certify_server, rendered

    former = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        found = certify_server(server, model, api_key, seconds=seconds, say=_progress())
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return found.to_json(), rendered(found), found.ok


def _dump(
    dump: Path, model: str | None, sampling: dict[str, Any], preset: Preset, tokens: int, page: Path | None
) -> tuple[str, RenderableType, bool]:
    """Certify a dump with the ops of `fp8rl`, and write its page.

    sampling: settings for rows without settings of their own; None: the dump's settings.
    """
    try:
        from fp8rl.commands import user_errors
        from fp8rl.rl.run.interrupts import interruptible
    except ModuleNotFoundError:
        raise user_error(
            "DUMP",
            found="no fp8rl in this environment",
            expected="fp8rl, whose ops and model code score a dump",
            remedy="Install it beside this package, or give --server URL.",
        ) from None
    with user_errors(), interruptible():
        from fp8rl_certify.dump.command import certify_file

        return certify_file(dump, model, sampling, preset, tokens, page, _progress())


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn a UserError into its message and exit code 2, and Ctrl-C into exit code 130."""
    try:
        yield
    except UserError as error:
        _print(f"error: {error}", stderr=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _print("interrupted", stderr=True)
        raise typer.Exit(_INTERRUPTED) from None


def _refuse_given(context: typer.Context, names: Iterable[str], beside: str) -> None:
    """Raise `UserError` if command-line options were given that have no effect together with `beside`."""
    options = {each.name: each.opts[0] for each in context.command.params}
    given = [name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise user_error(
            ", ".join(options[name] for name in given),
            found=" ".join(str(context.params[name]) for name in given),
            expected=f"none beside {beside}",
            remedy="Leave it out.",
        )


def _progress() -> Callable[[RenderableType], None]:
    from fp8rl_certify.terminal import Terminal

    return Terminal(stderr=True).print


def _print(shown: RenderableType, *, stderr: bool = False) -> None:
    from fp8rl_certify.terminal import Terminal

    Terminal(stderr=stderr).print(shown, soft_wrap=True)
