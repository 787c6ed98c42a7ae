"""A command in a child process: signals reach it once, what hangs is killed, and what was lost is started again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.servers import wait_until

SUPERVISED = """
import os, signal, subprocess, sys, time
from fp8rl import supervising
supervising._BURST_SECONDS, supervising._CLOSING_SECONDS = 1.0, float(sys.argv[1])
supervising._AGAIN_SECONDS, supervising._LEFT_SECONDS = 0.5, 0.2
supervising.supervise()
from fp8rl.rl.run.interrupts import interruptible
subprocess.Popen(["sh", "-c", "sleep 300 & echo $!"], start_new_session=True).wait()
def up(): print(os.getpid(), flush=True)
"""
HANGS = "signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))\nup()\nwhile True: time.sleep(60)"
ENDS = "with interruptible(): up(); time.sleep(60)"
SAYS = "os.kill(os.getppid(), signal.SIGUSR1 if times < 2 else signal.SIGUSR2); os._exit(1)"
SWALLOWS = "with interruptible():\n try: up(); time.sleep(60)\n except KeyboardInterrupt: time.sleep(60)"


@contextmanager
def supervised(program: str, closing_s: float = 100.0) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The supervising process, and the orphan and the child below it."""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", SUPERVISED + program, str(closing_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process, [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        finally:
            process.kill()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_nothing_is_left(signum: int) -> None:
    with supervised(ENDS) as (process, family):
        os.killpg(process.pid, signum)  # as a terminal does; the child is in a group of its own
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and said.count("Traceback") == 1
    assert not any(each.is_running() for each in family)


def test_an_interrupt_that_a_library_swallows_comes_again() -> None:
    with supervised(SWALLOWS) as (process, _):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130


def test_a_second_signal_kills_everything_and_a_burst_does_not() -> None:
    with supervised(HANGS) as (process, family):
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert process.stdout is not None and process.stdout.readline() == "interrupted\n" and process.poll() is None
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (130, "interrupted again: killing every process that was started\n")
    assert not any(each.is_running() for each in family)


def test_what_does_not_end_after_a_signal_is_killed() -> None:
    with supervised(HANGS, closing_s=1.5) as (process, family):
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and said.startswith("found no end within 1.5 s of the signal: killing")
    assert not any(each.is_running() for each in family)


def test_a_killed_supervisor_takes_its_child_along() -> None:
    with supervised(HANGS) as (process, (orphan, child)):
        process.kill()
        assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10)
        orphan.kill()


def test_a_child_that_is_killed_has_an_exit_code_and_a_sentence() -> None:
    with supervised(HANGS) as (process, (orphan, child)):
        child.kill()
        _, said = process.communicate(timeout=20)
    assert process.returncode == 137 and "found the command's process ended by SIGKILL" in said
    assert not orphan.is_running()


@pytest.mark.parametrize("ends", ["sys.exit(75 if times < 2 else 3)", SAYS])
def test_a_lost_run_is_started_again_until_it_is_stopped(ends: str) -> None:
    """Ray may end a run, with its own exit code, before the run can say with its code that it is lost, or stopped."""
    program = f"{SUPERVISED}times = supervising.restarts; print(times, flush=True)\n{ends}"
    command = [sys.executable, "-c", program, "100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and done.stdout.split()[1::2] == ["0", "1", "2"]
