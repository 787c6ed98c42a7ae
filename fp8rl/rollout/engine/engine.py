"""An engine: the client of one SGLang server that also starts, watches and ends this server; as a Ray actor too."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
import psutil
import ray
import torch
from pydantic import ValidationError

from fp8rl.models import load_architecture, read_model
from fp8rl.models.config_file import ConfigFile
from fp8rl.numerics.backend.cuda_toolkit import use_toolkit
from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.protocol import EngineReport, check_report, failed_plugin, missing_report
from fp8rl.rollout.engine.server.arguments import ServedChats, server_arguments, server_environment
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.engine.server.processes import claim_port, end_group, group_members
from fp8rl.rollout.engine.server.scratch import make_scratch, sweep
from fp8rl.rollout.types import Endpoint, EngineDiedError, EngineError, Group, SamplingParams, Trajectory

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SERVER_GRACE_S = 4.0
"""Seconds that a server gets to exit by itself before its processes are killed."""
_STOCK = {"mode": "native", "kv": "bf16", "router_replay": "off"}
"""What SGLang computes without our plugin, in the words of `NumericsConfig.to_dict`."""


class Engine(EngineClient):
    """One SGLang server from start to stop, and the requests to it. Call its coroutines in the same event loop.

    The server's processes are a separate process group, and die with the process that started them. A request raises
    EngineDiedError, with the end of the log, if the server has died, and EngineError if it does not run.
    """

    def __init__(
        self,
        config: RolloutSection,
        log_path: str | Path,
        plugin: Mapping[str, Any] | None = None,
        expected: EngineReport | None = None,
        host: str = LOOPBACK,
        served: ServedChats | None = None,
        api_key: str | None = None,
    ) -> None:
        """Only `start` connects this client to a server.

        log_path: the file to which the server's output is appended.
        plugin: configuration of our SGLang plugin, as data for JSON. None: stock SGLang.
        expected: the report that the plugin must give after each start. `start` sets the weight version in it.
        host: the only address at which the server listens.
        served: also open OpenAI's endpoints, with these settings. The model's directory then needs a tokenizer.
        api_key: the key for generation. None: a random one.
        """
        self.log_path = Path(log_path)
        self._config, self._plugin, self._expected = config, plugin, expected
        self._host, self._served, self._api_key = host, served, api_key
        self._process: subprocess.Popen[bytes] | None = None
        if plugin is not None and plugin.get("architecture") is not None:
            load_architecture(plugin["architecture"])  # in this process, which may be an actor's

    async def start(self, model_path: str | Path, weight_version: int = 0) -> Endpoint:
        """Start the server from a model directory, wait until it answers, and check the handshake.

        weight_version: version of the directory's weights. `NO_WEIGHTS`: it has no weights, and a sync sends them.

        Raises, after the server was stopped:
            UserError: the configured port is taken, or the model directory has no config.json.
            EngineDiedError: the process ended.
            EngineError: it did not answer within `config.start_timeout_s`.
            HandshakeError: the server's report differs from the expected one.
        """
        if self._process is not None:
            raise EngineError("the engine is running already. Stop it first.")
        _see_own_gpus_first()
        try:
            self._launch(Path(model_path), weight_version)
            await self._wait_until_ready()
            self._pids = {process.pid for process in group_members(self.pid)}
            await self._check_handshake(weight_version)
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        return self.endpoint

    @property
    def pid(self) -> int:
        """The id of the server's main process, which is also the id of its process group."""
        return self._running().pid

    def check(self) -> None:
        """Raise EngineDiedError, with the end of the log, if the process has ended."""
        status = self._running().poll()
        if status == -signal.SIGBUS:
            raise EngineDiedError(
                f"the engine process {self.pid} ended by SIGBUS: found /dev/shm full, expected room in it. "
                "Remove old files there, or give the container more shared memory (docker run --shm-size=1g)"
            )
        if status is not None:
            raise EngineDiedError(
                f"the engine process {self.pid} ended with status {status}, expected it to run. {self._log_end()}"
            )

    async def generate_in_any_loop(self, groups: Sequence[Group], sampling: SamplingParams) -> list[Trajectory]:
        """Sample all groups, like `generate`, in an event loop that may be another one than that of `start`."""
        try:
            async with EngineClient(self.endpoint) as client:
                return await client.generate(groups, sampling)
        except httpx.TransportError as error:
            raise await self._broken(error) from error

    async def cpu_seconds(self) -> float:
        """Return the processor seconds so far of all processes of the server except the one that answers requests.

        Schedulers need not answer, but the HTTP server must, because on a GPU even an idle scheduler uses a processor.
        """
        await self.weight_version()
        seconds = 0.0
        for process in await asyncio.to_thread(group_members, self.pid):
            if process.pid != self.pid:
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    seconds += times.user + times.system + times.children_user + times.children_system
        return seconds

    async def stop(self, grace_s: float = SERVER_GRACE_S) -> None:
        """Ask the server to exit, kill it after `grace_s`, and remove its temporary files. Can be called again."""
        process, self._process = self._process, None
        if process is not None:
            await self.close()
            await asyncio.to_thread(end_group, process, self._scratch, self._pids, grace_s)

    def _launch(self, model_path: Path, weight_version: int) -> None:
        """Start the server's process, and be its client from now on."""
        config, plugin, cuda = self._config, self._plugin, torch.cuda.is_available()
        model_type = ConfigFile.read(model_path, "model.path").model_type()
        numerics: Mapping[str, Any] = _STOCK if plugin is None else plugin["numerics"]
        mode: Mode = numerics["mode"]
        replays = self._served is None and numerics["router_replay"] != "off"
        port = claim_port(config.port, self._host)
        keys = self._api_key or secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        endpoint = Endpoint(f"http://{self._host}:{port}", *keys, ranks=config.tp)
        arguments = server_arguments(
            model_path,
            config,
            host=self._host,
            port=port,
            weight_version=weight_version,
            cuda=cuda,
            mode=mode,
            kv=numerics["kv"],
            routes=replays,
            served=self._served,
        )
        super().__init__(endpoint, routes=read_model(model_path, served=True).sizes if replays else None)
        if cuda:
            use_toolkit()
        sweep()
        self._scratch, lock = make_scratch()
        self._pids = set()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fp8rl.rollout.engine.server.launcher"],  # -P: not from here
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(
                    plugin, self._scratch, host=self._host, cuda=cuda, mode=mode, ranks=config.tp, sleep=config.sleep
                ),
                start_new_session=True,
                pass_fds=(lock,),
            )
        os.close(lock)
        request = {
            "arguments": arguments,
            "model_type": model_type,
            "fork": not cuda,
            "openai": self._served is not None,
            "api_key": endpoint.api_key,
            "admin_api_key": endpoint.admin_key,
        }
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is seen next
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        while time.monotonic() < deadline:
            try:
                self.check()
            except EngineDiedError as died:
                # Stock ops may not even load these weights; the plugin's own error is what helps then.
                if self._expected is not None and (refusal := failed_plugin(self._log())):
                    raise refusal from died
                raise
            with suppress(httpx.TransportError, EngineError):
                await super()._send("GET", "/model_info", timeout=5.0)
                return
            await asyncio.sleep(0.1)
        raise EngineError(
            f"the engine at {self.url} did not answer within {self._config.start_timeout_s:g} s "
            f"(rollout.start_timeout_s). {self._log_end()}"
        )

    async def _check_handshake(self, weight_version: int) -> None:
        if self._expected is None:
            return
        try:
            found = await self.report()
        except EngineDiedError:
            raise
        except (EngineError, ValidationError) as error:
            raise missing_report(self._log()) from error
        check_report(self._expected.model_copy(update={"weight_version": str(weight_version)}), found)

    async def _send(self, method: str, path: str, admin: bool = False, **options: Any) -> httpx.Response:
        self._running()
        try:
            return await super()._send(method, path, admin, **options)
        except httpx.TransportError as error:
            raise await self._broken(error) from error

    async def _broken(self, error: httpx.TransportError) -> EngineError:
        """Return an error of the engine in place of the connection's. Raises EngineDiedError: the process has ended."""
        for _ in range(20):  # a connection breaks a moment before its process is gone
            self.check()  # which says why
            await asyncio.sleep(0.1)
        return EngineError(f"the engine at {self.url} broke the connection: {error!r}")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EngineError("the engine is not running. Call start() first.")
        return self._process

    def _log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _log_end(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - (1 << 16)))
            lines = log.read().decode(errors="replace").splitlines()
        return f"The end of {self.log_path}:\n" + "\n".join(lines[-30:])


def _see_own_gpus_first() -> None:
    """Put the GPUs that Ray has given to this actor first among the GPUs that this process and its server see."""
    given = [str(gpu) for gpu in ray.get_gpu_ids()] if ray.is_initialized() else []
    if given:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*given, *(gpu for gpu in seen if gpu not in given)])


_CALLS = 100_000
"""Number of calls that an engine's actor can run at the same time, far more than it gets. Each turn of a conversation
is a call. At the limit, pulses would wait behind answers, and a healthy engine would count as hung."""
EngineActor = ray.remote(num_cpus=0, max_concurrency=_CALLS, max_restarts=0)(Engine)
"""Engine as a Ray actor. If the actor dies, for whatever reason, its server dies too."""


async def call(
    actor: Any,
    verb: Callable[Concatenate[Engine, Parameters], Coroutine[Any, Any, Result]],
    *arguments: Parameters.args,
    **options: Parameters.kwargs,
) -> Result:
    """Have an actor call this method of its `Engine`. Return the answer, or raise the exception with its own type.

    An error of Ray's own is raised as EngineDiedError: the actor has ended, or Ray's memory monitor has ended it.
    """
    try:
        answer: Result = await getattr(actor, verb.__name__).remote(*arguments, **options)
        return answer
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise EngineDiedError(f"the actor of the engine is gone: {error}") from error
