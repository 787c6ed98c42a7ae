import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fp8rl.rl.run import interrupts
from fp8rl.rl.run.interrupts import SIGNALS, ShutdownStack, interruptible, is_ending
from tests.support.paths import ROOT


@pytest.mark.parametrize("signum", SIGNALS)
def test_each_signal_interrupts_and_further_ones_are_ignored(signum: int) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signum)
        pytest.fail("not interrupted")
    for again in SIGNALS:
        os.kill(os.getpid(), again)


def test_handlers_come_back_when_nothing_happened(handlers: list[object]) -> None:
    with interruptible():
        pass
    with pytest.raises(ValueError, match="own"), interruptible():
        raise ValueError("own")
    assert [signal.getsignal(signum) for signum in SIGNALS] == handlers


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_is_known_before_the_main_thread_gets_to_handle_it(signum: int) -> None:
    known = []

    def look() -> None:  # nothing in between lets another thread run
        known.append(is_ending())
        signal.raise_signal(signum)
        known.append(is_ending())

    thread = threading.Thread(target=look)
    with pytest.raises(KeyboardInterrupt), interruptible():
        thread.start()
        thread.join()
    thread.join()
    assert known == [False, True]


def test_a_burst_interrupts_once_and_a_swallowed_interrupt_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    with pytest.raises(KeyboardInterrupt, match="last"), interruptible():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        now[0] = 2.0
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("last") from None


def test_nothing_cuts_the_closing_short(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def close(name: str) -> None:
        for signum in SIGNALS:
            os.kill(os.getpid(), signum)
        time.sleep(0.01)
        closed.append(name)

    with pytest.raises(KeyboardInterrupt), interruptible(), ShutdownStack() as closing:
        closing.callback(close, "first")
        closing.callback(close, "second")
        os.kill(os.getpid(), signal.SIGTERM)
    assert closed == ["second", "first"]
    assert capsys.readouterr().err == "interrupted: ending every process of the run\n"


HUNG_UP = """
import os, sys, time
from fp8rl.rl.run.interrupts import ShutdownStack, interruptible
def close(): print("closing"); open(sys.argv[1], "w").write("closed")
try:
    with interruptible(), ShutdownStack() as closing:
        closing.callback(close)
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)
"""


def test_a_terminal_that_is_closed_interrupts_and_cuts_nothing_short(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may run under `nohup`
        os.execv(sys.executable, [sys.executable, "-c", HUNG_UP, str(tmp_path / "closed")])
    assert os.read(terminal, 100).strip() == b"ready"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert (tmp_path / "closed").read_text() == "closed"


STUCK = """
import ctypes, os, subprocess, sys, threading
from fp8rl.rl.run import interrupts
from fp8rl.rl.run.interrupts import ShutdownStack, interruptible
interrupts._BURST_SECONDS, interrupts._END_SECONDS = 1.0, float(sys.argv[1])
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
held = threading.Lock()
held.acquire()
def close():
    print(child.pid, flush=True)
    while True:
        held.acquire(timeout=300) or exit()
with interruptible(), ShutdownStack() as closing:
    closing.callback(close)
    print("ready", flush=True)
    if sys.argv[2] == "library":
        print(child.pid, flush=True)
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        while True:
            library.pthread_mutex_lock(mutex)
    if sys.argv[2] == "wait":
        held.acquire()
"""


@contextmanager
def stuck(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose end does not come to its end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, *arguments], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_second_signal_ends_an_end_that_hangs_and_a_burst_does_not() -> None:
    signum = signal.SIGTERM
    with stuck("100", "wait") as process:
        process.send_signal(signum)
        child = psutil.Process(int(process.stdout.readline()))
        for _ in range(3):
            process.send_signal(signum)
            time.sleep(0.1)
        assert process.poll() is None
        time.sleep(1.0)
        process.send_signal(signum)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and not child.is_running()
    assert said.splitlines() == [
        "interrupted: ending every process of the run",
        "interrupted again: the end of the run is cut short, at fp8rl/rl/run/interrupts.py:"
        f"{line_of('super().__exit__(kind, error, trace)')} in __exit__: killing every process that was started",
    ]


@pytest.mark.slow
def test_a_second_signal_ends_a_process_that_stands_in_a_library() -> None:
    """No handler of Python's has its turn there."""
    with stuck("100", "library") as process:
        child = psutil.Process(int(process.stdout.readline()))
        time.sleep(0.5)  # until it stands there
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert process.poll() is None
        time.sleep(1.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and not child.is_running()
    assert said.startswith("interrupted again: the end of the run is cut short")


@pytest.mark.slow
def test_an_end_that_hangs_says_what_it_waits_for_and_kills_what_was_started() -> None:
    with stuck("1", "end") as process:
        child = int(process.stdout.readline())  # communicate() does not see what was read ahead with the line before
        _, wrong = process.communicate(timeout=20)
    assert process.returncode == 3 and not psutil.pid_exists(child)
    assert wrong.startswith("error: found close not ended after 1 s, at ")


EXITS = """
import sys, threading, time
from fp8rl.rl.run.interrupts import exit_within
threading.Thread(target=time.sleep, args=(300,), name="of a user").start()
exit_within(0.5, 7)
sys.exit(7)
"""


@pytest.mark.slow
def test_a_thread_that_was_left_behind_does_not_keep_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 7
    assert "found of a user not ended 0.5 s after all else" in done.stderr


def line_of(text: str) -> int:
    lines = Path(interrupts.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


LOST = """
import os, signal, time
from fp8rl.rl.run.interrupts import interruptible
class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # here the interrupt is raised, and Python cannot pass it on
try:
    with interruptible():
        held = Held()
        del held
        time.sleep(20)
except KeyboardInterrupt:
    os._exit(130)
"""


def test_an_interrupt_in_a_finalizer_is_raised_again() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "")
