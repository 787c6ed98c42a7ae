"""Engines that are forked from one process that has imported SGLang, where a test is not about how an engine starts.

The imports are half of a start, and most of the rest is what it finds out about the machine. What an engine makes of
its environment and its arguments comes after them, and is the launcher's own code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

from fp8rl.numerics.backend.probe import row_variant_ops
from fp8rl.rollout.server import server
from fp8rl.rollout.server.arguments import server_environment


class EngineTemplate:
    """The process that has imported SGLang, and the ends of those that were forked from it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        environment = server_environment({}, Path(tempfile.gettempdir()), cuda=False, mode="exact")
        command = [sys.executable, "-P", "-m", "tests.support.warm_engine", str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._unread = b""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, `SGLangServer.start` forks instead of starting Python anew."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": self._popen}))
            yield

    def _popen(self, command: list[str], **options: Any) -> Any:
        """`subprocess.Popen`, as `rollout.server.server` calls it."""
        assert command[1:] == ["-P", "-m", "fp8rl.rollout.server.launcher"], command
        reading, writing = os.pipe()
        inherited = (reading, options["stdout"].fileno(), *options["pass_fds"])
        asked = json.dumps({"env": options["env"], "cwd": os.getcwd()}).encode()
        with self._lock:
            socket.send_fds(self._socket, [len(asked).to_bytes(4, "big")], inherited)
            self._socket.sendall(asked)
            while True:
                event, pid, status = self._next()
                if event == "forked":
                    break
                self._ended[pid] = status
        os.close(reading)
        return _Forked(self, pid, os.fdopen(writing, "wb", buffering=0))

    def status_of(self, pid: int) -> int | None:
        """Its exit status as `Popen.returncode` has it; None while it runs."""
        with self._lock:
            while pid not in self._ended and select.select([self._socket], [], [], 0)[0]:
                _, ended, status = self._next()
                self._ended[ended] = status
            return self._ended.get(pid)

    def _next(self) -> tuple[str, int, int]:
        while b"\n" not in self._unread:
            received = self._socket.recv(4096)
            assert received, "the process that engines are forked from has ended"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        event, pid, status = json.loads(line)
        return event, pid, status

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)


class _Forked:
    """What `SGLangServer` uses of a `subprocess.Popen`."""

    def __init__(self, template: EngineTemplate, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin, self.returncode = pid, stdin, None
        self._template = template

    def poll(self) -> int | None:
        self.returncode = self._template.status_of(self.pid) if self.returncode is None else self.returncode
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("an engine", timeout)
            time.sleep(0.01)
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _serve(control: socket.socket) -> None:
    """Fork an engine for each request, and report which have ended, until the other side closes."""
    for name in (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.model_executor.model_runner",  # with Megatron, which its dumper asks for
        "fp8rl.rollout.server.launcher",
    ):
        importlib.import_module(name)
    variant = row_variant_ops(torch.device("cpu"))  # of this machine, as every engine would find out anew
    gc.collect()
    gc.freeze()  # or each fork walks through all that the imports have made
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            os.read(wake, 100)
            _report_ended(control)
        if control in ready:
            header, fds, _, _ = socket.recv_fds(control, 4, 8)
            if not header:
                return
            size = int.from_bytes(header, "big")
            asked = json.loads(control.recv(size, socket.MSG_WAITALL))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake, woken, control.fileno()):
                    os.close(descriptor)
                control.detach()
                _become(asked, fds, variant)
            for descriptor in fds:
                os.close(descriptor)
            _say(control, "forked", pid, 0)


def _report_ended(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(control, "ended", pid, os.waitstatus_to_exitcode(status))


def _say(control: socket.socket, event: str, pid: int, status: int) -> None:
    control.sendall(json.dumps([event, pid, status]).encode() + b"\n")


def _become(asked: dict[str, Any], fds: list[int], variant: list[str]) -> None:
    """The engine: a session, an environment and a standard input of its own. variant: the ops that vary by row here."""
    code = 1
    try:
        os.setsid()
        reading, log, *kept = fds
        os.dup2(reading, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for descriptor in (reading, log):
            os.close(descriptor)
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        tempfile.tempdir = None
        sys.argv = ["launcher"]
        from fp8rl.rollout.plugin import state
        from fp8rl.rollout.server import launcher
        from tests.support import plants

        state.row_variant_ops = lambda device: variant  # type: ignore[assignment]
        if planted := os.environ.get(plants.PLANT):
            getattr(plants, planted)()
        launcher.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
