"""Waits that end, whatever they wait for."""

from __future__ import annotations

import ast
import asyncio
import sys
import time
from contextlib import suppress

import psutil
import pytest

from fp8rl.rollout.deadlines import end, end_process, within
from tests.support.paths import ROOT
from tests.support.servers import wait_until
from tests.test_architecture import python_files


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_in_the_turn_of_the_answer_is_not_forgotten(turns: int) -> None:
    async def raced() -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(within(60.0, answer))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answer.set_result(3)
        for _ in range(turns):
            await asyncio.sleep(0)
        if not waiting.cancel():
            assert await waiting == 3
            return 0
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return 1

    async def often() -> int:
        return sum([await raced() for _ in range(1000)])

    assert asyncio.run(often()) == (1000 if turns < 2 else 0)


def test_what_comes_in_time_is_returned_and_what_is_raised_is_raised() -> None:
    async def wrong(error: type[BaseException]) -> int:
        raise error

    async def tried() -> None:
        assert await within(5.0, asyncio.sleep(0.01, 3)) == 3
        with pytest.raises(TimeoutError):
            await within(0.01, asyncio.sleep(5.0))
        for error, expected in ((ZeroDivisionError, ZeroDivisionError), (asyncio.CancelledError, RuntimeError)):
            with pytest.raises(expected):
                await within(5.0, wrong(error))

    asyncio.run(tried())


@pytest.mark.slow
def test_a_task_that_goes_on_in_spite_of_its_cancellation_is_not_waited_for() -> None:
    async def stubborn() -> None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def tried() -> None:
        task, other = asyncio.create_task(stubborn()), asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        assert await end(task, other, seconds=0.2) == [task]
        assert other.cancelled() and not task.done()
        await task

    asyncio.run(tried())


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_process_that_does_not_end_is_killed_with_all_that_it_has_started() -> None:
    async def tried() -> list[psutil.Process]:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", STUBBORN, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        await end_process(process, 0.2)
        assert process.returncode == -9
        await end_process(process)
        return family

    family = asyncio.run(tried())
    assert len(family) == 2 and wait_until(lambda: not any(each.is_running() for each in family), 5)


def test_nothing_else_waits_by_wait_for_or_cancels_a_task() -> None:
    """`given_up` is a future that nobody has begun, `watch` a timer."""
    allowed = {"fp8rl/rollout/deadlines.py:task", "fp8rl/rl/run/interrupts.py:watch"}
    allowed |= {f"fp8rl/rl/run/background.py:{name}" for name in ("given_up", "begun")}
    found = set()
    for folder in ("fp8rl", "lab"):
        for path in python_files(folder):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "wait_for" in text or "cancel" in text else ():
                names = {node.attr} if isinstance(node, ast.Attribute) else set()
                if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                    names = {alias.name for alias in node.names}
                where = path.relative_to(ROOT)
                if "wait_for" in names and not (
                    isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("asyncio", "tasks")
                ):
                    found.add(f"{where}: wait_for")
                if "cancel" in names and isinstance(node, ast.Attribute):
                    found.add(f"{where}:{ast.unparse(node.value)}")
    assert found == allowed
