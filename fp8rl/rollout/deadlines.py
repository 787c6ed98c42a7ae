"""Waits with a timeout that can always be cancelled. They replace `asyncio.wait_for`, which has two faults.

In Python 3.11 `wait_for` loses a cancellation if the result arrives in the same turn of the event loop (bpo-37658). The
task that cancelled it then waits for ever. And after its timeout `wait_for` waits without a limit for a task that
ignores its cancellation, such as a user's function that catches every exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import psutil

Result = TypeVar("Result")

GRACE_S = 5.0
"""Seconds within which a cancelled task or a terminated process must end."""


async def within(seconds: float, awaitable: Awaitable[Result]) -> Result:
    """Return the result of an awaitable. Raises TimeoutError: it took longer than `seconds`. The awaitable is cancelled
    at the timeout, and also if this call is cancelled."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        return result_of(task)
    finally:
        await end(task)


def result_of(task: asyncio.Future[Result]) -> Result:
    """Return the result of a user's task that has ended, or raise its error. CancelledError and TimeoutError of its own
    become RuntimeError: a caller would take them for its own cancellation, and for the end of the task's time."""
    try:
        return task.result()
    except (asyncio.CancelledError, TimeoutError) as error:
        raise RuntimeError(
            f"found a {type(error).__name__} of a function's own, expected it to catch this error"
        ) from error


async def end(*tasks: asyncio.Future[Any], seconds: float = GRACE_S) -> list[asyncio.Future[Any]]:
    """Cancel tasks and wait for their end.

    Tasks that have not ended after `seconds` are cancelled once more. They are returned without another wait.
    """
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=seconds)
    left = [task for task in left if not task.done()]
    for task in left:
        task.cancel()
    for task in set(tasks).difference(left):
        if not task.cancelled():
            task.exception()  # else it would be logged that nobody has asked for it
    return left


async def end_process(process: asyncio.subprocess.Process, seconds: float = GRACE_S) -> None:
    """Terminate a process. If it still runs after `seconds`, kill it with all its children."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        with suppress(TimeoutError):
            await within(seconds, process.wait())
    finally:
        if process.returncode is None:
            kill_family(process.pid)
    with suppress(TimeoutError):  # somebody else may hold its pipes open
        await within(seconds, process.wait())


def kill_family(pid: int) -> list[psutil.Process]:
    """Kill a process and all descendants that psutil still finds. Return them."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    return family
