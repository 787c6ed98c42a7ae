"""Engines that are forked from one process that has imported SGLang, where a test is not about how an engine starts."""

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, Any

import ray

from fp8rl.rl.run.engines import serving
from fp8rl.rollout.engine import engine as engine_module
from fp8rl.rollout.engine.engine import Engine
from tests.support.fork_server import send_request, socket_of


@contextmanager
def forked_engines() -> Iterator[None]:
    """Within, engines of this process, and those of stacks that it opens, are forked instead of started anew. They end
    with their owners."""
    from pytest import MonkeyPatch  # no business of an engine's actor

    actor = ray.remote(**serving.EngineActor._default_options)
    with MonkeyPatch.context() as patch:
        patch.setattr(serving, "EngineActor", actor(WarmEngine))
        patch.setattr(engine_module, "subprocess", Template().subprocess)
        yield


class WarmEngine(Engine):
    """In the actor of an engine, `Engine.start` forks from the template, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        engine_module.subprocess = Template().subprocess  # type: ignore[attr-defined]
        super().__init__(*arguments, **options)


class Template:
    """A process's connection to the one that has imported SGLang: it asks for engines, and hears which have ended."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(socket_of("engine_template"))
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._unread = b""

    @property
    def subprocess(self) -> Any:
        """In place of the module: its `Popen` forks."""
        return SimpleNamespace(**{**vars(subprocess), "Popen": self._popen})

    def _popen(self, command: list[str], **options: Any) -> Any:
        """`subprocess.Popen`, as `Engine` calls it."""
        assert command[1:] == ["-P", "-m", "fp8rl.rollout.engine.server.launcher"], command
        reading, writing = os.pipe()
        inherited = (reading, options["stdout"].fileno(), *options["pass_fds"])
        with self._lock:
            send_request(self._socket, list(inherited), env=options["env"], cwd=os.getcwd())
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
            while pid not in self._ended and self._waits():
                _, ended, status = self._next()
                self._ended[ended] = status
            return self._ended.get(pid)

    def _waits(self) -> bool:
        """Whether something was said that is not read; several lines may have come as one."""
        return b"\n" in self._unread or bool(select.select([self._socket], [], [], 0)[0])

    def _next(self) -> tuple[str, int, int]:
        while b"\n" not in self._unread:
            received = self._socket.recv(4096)
            assert received, "the process that engines are forked from has ended"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        event, pid, status = json.loads(line)
        return event, pid, status


class _Forked:
    """What `Engine` uses of a `subprocess.Popen`."""

    def __init__(self, template: Template, pid: int, stdin: IO[bytes]) -> None:
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
