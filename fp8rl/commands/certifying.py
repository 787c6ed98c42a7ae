"""The command that certifies: a running engine, or what an engine has said."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from fp8rl.commands.shared import AsJson, end, progress, show, user_errors
from numerics.errors import user_error
from rl.run.lifecycle.interrupts import interruptible


def certify(
    server: Annotated[
        str | None,
        typer.Option(help="Address of a running server, e.g. http://127.0.0.1:30000; with /v1, OpenAI's API."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="What the server calls it, where it has several.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="FP8RL_API_KEY", help="Key of the server.")] = None,
    seconds: Annotated[
        float, typer.Option(min=5.0, help="For all requests; what does not fit is not reached.")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Say whether an engine is exact: do its log-probabilities depend on what else it computes?

    Asks for the same answers alone, in batches, from the cache, in other chunks, under load, and compares bit for bit.
    Exit code 0: certified, 1: broken or undecided, 2: bad input.
    """
    with user_errors(), redirect_stdout(sys.stderr):
        from diagnose.certify import certify_server, rendered

        if server is None:
            raise user_error("--server", found="none", expected="an address", remedy="Give --server URL.")
        with interruptible():
            found = certify_server(server, model, api_key, seconds=seconds, say=progress())
    print(found.to_json()) if as_json else show(rendered(found), soft_wrap=True)
    end(found.ok)
