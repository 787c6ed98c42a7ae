"""A run as a job of a Ray cluster that goes on running."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.terminal import printable
from fp8rl.rollout.loopback import reach_loopback

_DASHBOARD = re.compile(r"https?://[\w.\-:@\[\]]{1,253}/?", re.ASCII)


def submit(arguments: Sequence[str], address: str, *, wait: bool, say: Callable[[str], object]) -> bool:
    """Have the cluster run `fp8rl train` with these arguments, typed as in the current directory, which its nodes see.

    address: of the cluster's dashboard, such as http://127.0.0.1:8265. wait: show what the job says until it ends.
    Whether it has succeeded; without `wait`, whether it was taken.

    Raises:
        UserError: it is no such address, no cluster answers there, or none does any more.
    """
    _check_address(address)
    command = Path(sys.executable).with_name("fp8rl")
    # From this directory, so that relative paths mean what they mean here.
    entrypoint = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([str(command), 'train', *arguments])}"
    reach_loopback()
    with _reached(address):
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=entrypoint)
    say(f"job      {job}")
    options = f"--address {address} {job}"
    if not wait:
        say(f"watch    ray job logs --follow {options}")
        say(f"stop     ray job stop {options}")
        return True
    with _reached(address):
        asyncio.run(_show(client, job))
        status = client.get_job_status(job)
    say(f"job      {job}: {status}")
    return status == JobStatus.SUCCEEDED


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Ray prints in them whose line it is."""


def _check_address(address: str) -> None:
    """Refuse what is no address of a dashboard. Ray would import what stands before `://`, or look for a cluster."""
    with suppress(ValueError):  # a port that is no number, a bracket that is not closed
        if _DASHBOARD.fullmatch(address) and urlsplit(address).hostname and urlsplit(address).port != 0:
            return
    raise user_error(
        "--address",
        found=address,
        expected="the address of a Ray cluster's dashboard, as http://HOST:PORT",
        remedy="Correct it; `ray start --head` prints it.",
    )


async def _show(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(printable(_COLOURS.sub("", text)), end="", flush=True)


@contextmanager
def _reached(address: str) -> Iterator[None]:
    """Whatever keeps the dashboard from answering is one sentence: a head may die between two requests."""
    try:
        yield
    except AuthenticationError as error:
        raise user_error(
            "RAY_AUTH_MODE",
            found=f"token ({str(error).partition('. ')[0]})",
            expected="a token that can be read, and that the cluster has",
            remedy="Name its file in RAY_AUTH_TOKEN_PATH; `ray get-auth-token --generate` makes ~/.ray/auth_token.",
        ) from None
    except (OSError, RuntimeError, ValueError, aiohttp.ClientError) as error:
        why = (str(error) or repr(error)).splitlines()[0]
        raise user_error(
            "--address",
            found=f"{address} ({why})",
            expected="the dashboard of a Ray cluster that accepts jobs",
            remedy="Start one with `ray start --head`, or correct the address. If it asks for a token, put the token "
            "and RAY_AUTH_MODE into this environment too.",
        ) from None
