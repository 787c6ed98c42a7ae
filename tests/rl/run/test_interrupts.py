import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8rl.rl.run.interrupts import SIGNALS, BoundedExitStack, interruptible
from tests.support.paths import ROOT


@pytest.mark.parametrize("signum", SIGNALS)
def test_each_signal_interrupts_and_further_ones_are_ignored(signum: int) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signum)
        pytest.fail("not interrupted")
    for again in SIGNALS:
        os.kill(os.getpid(), again)


def test_handlers_come_back_when_nothing_happened() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with interruptible():
        pass
    with pytest.raises(ValueError, match="own"), interruptible():
        raise ValueError("own")
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_nothing_cuts_the_closing_short(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def close(name: str) -> None:
        for signum in SIGNALS:
            os.kill(os.getpid(), signum)
        time.sleep(0.01)
        closed.append(name)

    with pytest.raises(KeyboardInterrupt), interruptible(), BoundedExitStack() as outer, BoundedExitStack() as closing:
        outer.callback(close, "third")
        closing.callback(close, "second")
        closing.callback(close, "first")
        os.kill(os.getpid(), signal.SIGTERM)
    assert closed == ["first", "second", "third"]
    assert capsys.readouterr().err == "interrupted: ending every process of the run\n"


HUNG_UP = """
import os, sys, time
from fp8rl.rl.run.interrupts import BoundedExitStack, interruptible
def close(): print("closing"); open(sys.argv[1], "w").write("closed")
try:
    with interruptible(), BoundedExitStack() as closing:
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
import threading
from fp8rl.rl.run import interrupts
def hangs(): threading.Event().wait()
interrupts._END_SECONDS = 0.5
with interrupts.BoundedExitStack() as closing:
    closing.callback(hangs)
"""


def test_an_end_that_hangs_says_what_it_waits_for() -> None:
    """Who supervises the process kills what it has started: test_supervising.py."""
    done = subprocess.run([sys.executable, "-c", STUCK], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "error: found hangs not ended after 0.5 s: it is given up\n")
