"""Starts, watches and stops one SGLang server, and removes what it leaves behind."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from fp8rl.models.config_file import ConfigFile
from fp8rl.numerics.backend.cuda_toolkit import use_toolkit
from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.server.arguments import ServedChats, has_cuda, server_arguments, server_environment
from fp8rl.rollout.engine.server.scratch import make_scratch, remove_queues, remove_scratch, sweep
from fp8rl.rollout.types import NO_WEIGHTS, Endpoint, EngineDiedError, EngineError

SERVER_GRACE_S = 4.0
"""Seconds that a server gets to exit by itself before its processes are killed."""
_KILLED_S = 60.0  # a busy machine takes its time to free an engine's memory
_FIRST_PORT = 16000


class SGLangServer:
    """A running server. Its processes are a separate process group, and die with the process that started them."""

    def __init__(self, process: subprocess.Popen[bytes], endpoint: Endpoint, log_path: Path, scratch: Path) -> None:
        self.endpoint = endpoint
        self.log_path = log_path
        self._process = process
        self._scratch = scratch
        self._stopped = False
        self._pids: set[int] = set()

    @classmethod
    def start(
        cls,
        model_path: str | Path,
        config: RolloutSection,
        *,
        log_path: str | Path,
        plugin: Mapping[str, Any] | None = None,
        weight_version: int = 0,
        routes: bool = False,
        host: str = LOOPBACK,
        cancelled: threading.Event | None = None,
        served: ServedChats | None = None,
        api_key: str | None = None,
    ) -> SGLangServer:
        """Start a server and wait until it answers.

        weight_version: version of the directory's weights. `NO_WEIGHTS`: it has no weights, and a sync sends them.
        plugin: configuration for our SGLang plugin, as data for JSON. None: stock SGLang.
        log_path: the file to which the server's output is appended.
        routes: record the experts of each token. On a CPU this needs our plugin.
        host: the only address at which the server listens.
        cancelled: an event that another thread sets to cancel the start.
        served: also open OpenAI's endpoints, with these settings. The model's directory then needs a tokenizer.
        api_key: the key for generation. None: a random one.

        Raises:
            UserError: the configured port is taken, or the model directory has no config.json.
            EngineDiedError: the process ended.
            EngineError: it did not answer within `config.start_timeout_s`.
        """
        model_type = ConfigFile.read(Path(model_path), "model.path").model_type()
        cuda = has_cuda()
        numerics: dict[str, Any] = {"mode": "native", "kv": "bf16"} if plugin is None else plugin["numerics"]
        mode: Mode = numerics["mode"]
        port = _claim_port(config.port, host)
        keys = api_key or secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        endpoint = Endpoint(f"http://{host}:{port}", *keys, ranks=config.tp)
        arguments = server_arguments(
            Path(model_path),
            config,
            host=host,
            port=port,
            weight_version=weight_version,
            cuda=cuda,
            mode=mode,
            kv=numerics["kv"],
            routes=routes,
            served=served,
            dummy=weight_version == NO_WEIGHTS,
        )
        if cuda:
            use_toolkit()
        sweep()
        scratch, lock = make_scratch()
        log_path = Path(log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fp8rl.rollout.engine.server.launcher"],  # -P: not from here
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(
                    plugin, scratch, host=host, cuda=cuda, mode=mode, ranks=config.tp, sleep=config.sleep
                ),
                start_new_session=True,
                pass_fds=(lock,),
            )
        os.close(lock)
        server = cls(process, endpoint, log_path, scratch)
        try:
            server._hand_over(
                arguments=arguments,
                model_type=model_type,
                fork=not cuda,
                openai=served is not None,
                api_key=endpoint.api_key,
                admin_api_key=endpoint.admin_key,
            )
            server._wait_until_ready(config.start_timeout_s, cancelled or threading.Event())
            server._pids = {process.pid for process in server.processes()}
        except BaseException:
            server.stop(grace_s=0.0)
            raise
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise EngineDiedError, with the end of the log, if the process has ended."""
        if self._process.poll() == -signal.SIGBUS:
            raise EngineDiedError(
                f"the engine process {self.pid} ended by SIGBUS: found /dev/shm full, expected room in it. "
                "Remove old files there, or give the container more shared memory (docker run --shm-size=1g)"
            )
        if not self.alive():
            raise EngineDiedError(
                f"the engine process {self.pid} ended with status {self._process.returncode}, expected it to run. "
                f"The end of {self.log_path}:\n{log_tail(self.log_path)}"
            )

    def processes(self) -> list[psutil.Process]:
        """Return every process of the server that runs: main, scheduler, detokenizer and their children."""
        members = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self.pid:
                    members.append(process)
        return _living(members)

    def cpu_seconds(self) -> float:
        """Return the processor seconds so far of all processes of the server except the one that answers requests.

        The call returns also if a scheduler hangs.
        """
        seconds = 0.0
        for process in self.processes():
            if process.pid != self.pid:
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    seconds += times.user + times.system + times.children_user + times.children_system
        return seconds

    def stop(self, grace_s: float = SERVER_GRACE_S) -> None:
        """Ask the server to exit, kill it after `grace_s`, and remove its temporary files. Can be called again."""
        if self._stopped:
            return
        self._stopped = True
        self._pids |= {process.pid for process in self.processes()}
        if self.alive() and grace_s > 0:
            self._process.terminate()
            self._wait_until_gone(grace_s)
        assert self._process.stdin is not None
        self._process.stdin.close()  # the lifeline: whoever is left dies now
        for process in self._wait_until_gone(1.0):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        survivors = self._wait_until_gone(_KILLED_S)
        remove_queues(self._pids)
        remove_scratch(self._scratch)
        if survivors:
            raise EngineError(f"engine processes {[p.pid for p in survivors]} survived SIGKILL. End them by hand.")
        self._process.wait(_KILLED_S)

    def _wait_until_gone(self, timeout_s: float) -> list[psutil.Process]:
        """Wait for the end of all processes. Return those that still run after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        members = self.processes()
        while members and time.monotonic() < deadline:
            time.sleep(0.02)
            members = _living(members)
        return members

    def _hand_over(self, **request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.wait(5.0)
            self.check()

    def _wait_until_ready(self, timeout_s: float, cancelled: threading.Event) -> None:
        deadline = time.monotonic() + timeout_s
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"}
        with httpx.Client(base_url=self.endpoint.url, headers=headers, timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                self.check()
                try:
                    if client.get("/model_info").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                if cancelled.wait(0.1):
                    raise EngineError("the start of the engine was cancelled")
        raise EngineError(
            f"the engine at {self.endpoint.url} did not answer within {timeout_s:g} s (rollout.start_timeout_s). "
            f"The end of {self.log_path}:\n{log_tail(self.log_path)}"
        )


def log_tail(path: Path, lines: int = 30) -> str:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 65536))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    living = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _claim_port(port: int | None, host: str) -> int:
    """Return `port` if nobody listens there.

    None: return a free port below the ports of outgoing connections, which could take it before the server listens.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    drawn = random.SystemRandom().sample(range(_FIRST_PORT, max(first_outgoing, _FIRST_PORT + 1000)), 100)
    for number in drawn if port is None else [port]:
        with socket.socket() as probe, suppress(OSError):
            if port is not None:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
            return number
    if port is None:
        raise EngineError(f"found 100 ports from {_FIRST_PORT} on in use, expected a free one. Set rollout.port")
    raise user_error(
        "rollout.port",
        found=port,
        expected="a free port, but another program listens there",
        remedy="Choose another one, or null for any free one.",
    )
