"""Runs a rollout engine: one SGLang server and its client, in a Ray actor."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import ray
import torch
from pydantic import ValidationError

from fp8rl.models import load_architecture, read_model
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.protocol import EngineReport, Memory, check_report, failed_plugin, missing_report
from fp8rl.rollout.engine.server import SERVER_GRACE_S, SGLangServer
from fp8rl.rollout.engine.server.answers import route_shape
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import (
    Completion,
    Endpoint,
    EngineDiedError,
    EngineError,
    Group,
    Load,
    SamplingParams,
    StaleWeightsError,
    Trajectory,
)

Result = TypeVar("Result")
_MOST_ABORTS = 1000
"""Largest number of aborts of one answer. Without a limit, the caller of a faulty engine could wait for ever."""
_NOTHING = Completion([], [], [], finished=False, aborted=True)
"""An answer that has not been requested yet."""


@dataclass(frozen=True)
class Health:
    """The state of an engine's server."""

    alive: bool
    """The server process runs."""
    pid: int | None


@dataclass(frozen=True)
class Slept:
    """Bytes that a sleeping engine has released, and bytes that it still has. Each is the largest of all its ranks."""

    released: int
    """Bytes of weights and KV cache that were released. CUDA graphs are also released, but not counted."""
    behind: int
    """Bytes that are still in use (`rollout.engine.protocol.Memory.in_use`)."""


class Engine:
    """Owns one server from start to stop. Call all methods except the constructor in the same event loop."""

    def __init__(
        self,
        config: RolloutSection,
        log_path: str | Path,
        plugin: Mapping[str, Any] | None = None,
        expected: EngineReport | None = None,
        host: str = LOOPBACK,
    ) -> None:
        """plugin: configuration of our SGLang plugin. None: stock SGLang. expected: the report that the plugin must
        give after each start. `start` sets the weight version in it. host: address to listen at."""
        self._config = config
        self._log_path = Path(log_path)
        self._plugin = plugin
        self._expected = expected
        self._routes = plugin is not None and plugin["numerics"]["router_replay"] != "off"
        self._host = host
        if plugin is not None and plugin.get("architecture") is not None:
            load_architecture(plugin["architecture"])  # for this process, which is an actor's
        self._server: SGLangServer | None = None
        self._client: EngineClient | None = None

    async def start(self, model_path: str | Path, weight_version: int = 0) -> Endpoint:
        """Start the server from a model directory and check the handshake.

        Raises:
            UserError, EngineError: see SGLangServer.start.
            HandshakeError: the server's report differs from the expected one. The server was stopped.
        """
        if self._server is not None:
            raise EngineError("the engine is running already. Stop it first.")
        routes = route_shape(read_model(Path(model_path), served=True).sizes) if self._routes else None
        cancelled = threading.Event()
        _see_own_gpus_first()
        try:
            self._server = await asyncio.to_thread(
                SGLangServer.start,
                model_path,
                self._config,
                log_path=self._log_path,
                plugin=self._plugin,
                weight_version=weight_version,
                routes=self._routes,
                host=self._host,
                cancelled=cancelled,
            )
        except asyncio.CancelledError:
            cancelled.set()  # the thread goes on: let it end what it started
            raise
        except EngineDiedError as died:
            # Stock ops may not even load these weights; the plugin's own error is what helps then.
            if self._expected is not None and (refusal := failed_plugin(self._log())):
                raise refusal from died
            raise
        self._client = EngineClient(self._server.endpoint, routes=routes)
        try:
            await self._check_handshake(weight_version)
        except BaseException:
            await self.stop()
            raise
        return self._server.endpoint

    async def generate(self, groups: Sequence[Group], sampling: SamplingParams) -> list[Trajectory]:
        """Sample groups. See `sample_groups`."""
        return await self._call(lambda c: sample_groups(c, groups, sampling))

    async def pulse(self) -> Load:
        """Return the engine's load. Its HTTP server and, if it has a plugin, its scheduler must answer for this."""
        if self._plugin is not None:
            await self._call(lambda c: c.ping())
        return await self._call(lambda c: c.load())

    async def cpu_seconds(self) -> float:
        """Return the processor seconds of the engine's schedulers so far. Schedulers need not answer.

        The HTTP server must answer, because on a GPU even an idle scheduler uses a processor.
        """
        await self._call(lambda c: c.weight_version())
        return await asyncio.to_thread(self._running()[0].cpu_seconds)

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Score sequences. See `EngineClient.score`."""
        return await self._call(lambda c: c.score(sequences))

    async def held(self) -> dict[str, str]:
        """Return digests of the engine's weights. See `EngineClient.manifest`."""
        return (await self._call(lambda c: c.manifest())).entries

    async def flush(self) -> None:
        """Forget every cached prefix. See `EngineClient.flush`."""
        await self._call(lambda c: c.flush())

    async def sleep(self) -> Slept:
        """Release weights, KV cache and CUDA graphs. Unfinished answers wait. A sync wakes the engine."""
        await self._call(lambda c: c.pause("retract"))
        before = await self.memory()
        await self._call(lambda c: c.release())
        after = await self.memory()
        given = (b.weights + b.kv_cache - a.weights - a.kv_cache for b, a in zip(before, after, strict=True))
        return Slept(max(given), max(rank.in_use for rank in after))

    async def memory(self) -> list[Memory]:
        """Return the bytes that each rank has in use. See `EngineClient.memory`."""
        return await self._call(lambda c: c.memory())

    async def report(self) -> EngineReport:
        """Return the plugin's report. See `EngineClient.report`."""
        return await self._call(lambda c: c.report())

    async def endpoint(self) -> Endpoint:
        """Return the server's address and keys, which change with every start."""
        return self._running()[0].endpoint

    async def health(self) -> Health:
        alive = self._server is not None and self._server.alive()
        return Health(alive, self._server.pid if self._server else None)

    async def stop(self, grace_s: float = SERVER_GRACE_S) -> None:
        """Stop the server, if there is one. After `grace_s` seconds kill it."""
        server, client = self._server, self._client
        self._server = self._client = None
        if client is not None:
            await client.close()
        if server is not None:
            await asyncio.to_thread(server.stop, grace_s)

    async def _check_handshake(self, weight_version: int) -> None:
        if self._expected is None:
            return
        try:
            found = await self.report()
        except (EngineError, ValidationError) as error:
            if isinstance(error, EngineDiedError):
                raise
            raise missing_report(self._log()) from error
        check_report(self._expected.model_copy(update={"weight_version": str(weight_version)}), found)

    def _log(self) -> str:
        return self._log_path.read_text(errors="replace")

    async def _call(self, use: Callable[[EngineClient], Awaitable[Result]]) -> Result:
        try:
            return await use(self._running()[1])
        except httpx.TransportError as error:
            server = self._running()[0]
            for _ in range(20):  # a connection breaks a moment before its process is gone
                server.check()  # which says why
                await asyncio.sleep(0.1)
            raise EngineError(f"the engine at {server.endpoint.url} broke the connection: {error!r}") from error

    def _running(self) -> tuple[SGLangServer, EngineClient]:
        if self._server is None or self._client is None:
            raise EngineError("the engine is not running. Call start() first.")
        return self._server, self._client


async def sample_groups(client: EngineClient, groups: Sequence[Group], sampling: SamplingParams) -> list[Trajectory]:
    """Sample all groups. Answers are in the order of the groups, and `Trajectory.group` is the index of a group.

    An answer that a pause has aborted continues after its last token, with the same seed and the rest of its tokens.
    Each token has the version of the weights that sampled it.
    """
    asked = [(group.prompt.token_ids, seed, index) for index, group in enumerate(groups) for seed in group.seeds]
    answers = [_NOTHING for _ in asked]
    for _ in range(_MOST_ABORTS):
        aborted = [row for row, answer in enumerate(answers) if answer.aborted]
        if not aborted:
            return [
                Trajectory(
                    prompt_ids=prompt_ids,
                    token_ids=answer.token_ids,
                    logprobs=answer.logprobs,
                    finished=answer.finished,
                    weight_versions=answer.weight_versions,
                    group=group,
                    seed=seed,
                    routed_experts=answer.routed_experts,
                    supports=answer.supports,
                )
                for (prompt_ids, seed, group), answer in zip(asked, answers, strict=True)
            ]
        completions = await client.complete(
            [asked[row][0] + answers[row].token_ids for row in aborted],
            sampling,
            [asked[row][1] for row in aborted],
            [len(answers[row].token_ids) for row in aborted],
        )
        for row, completion in zip(aborted, completions, strict=True):
            answers[row] = answers[row].then(completion)
    raise EngineError(f"found answers that the engine aborted {_MOST_ABORTS} times, expected it to finish them")


def check_versions(trajectories: Iterable[Trajectory], oldest: int, newest: int) -> None:
    """Raise StaleWeightsError, with counts, if a token has a weight version below `oldest` or above `newest`."""
    found = Counter(version for trajectory in trajectories for version in trajectory.weight_versions)
    wrong = sum(count for version, count in found.items() if not oldest <= version <= newest)
    if wrong:
        counts = ", ".join(f"{count} at version {version}" for version, count in sorted(found.items()))
        expected = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        raise StaleWeightsError(
            f"{wrong} of {found.total()} tokens were sampled with other weights than expected: found {counts}, "
            f"expected all at {expected}. Sync the weights before sampling."
        )


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
