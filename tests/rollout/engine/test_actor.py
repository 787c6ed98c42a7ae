"""The engine: handshake at the start, death, and the Ray actor around it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from fp8rl.rl.run.cluster.cluster import ray_cluster
from fp8rl.rollout.deadlines import within
from fp8rl.rollout.engine.actor import Engine, EngineActor
from fp8rl.rollout.engine.server.scratch import sweep
from fp8rl.rollout.types import EngineDiedError, EngineError, SamplingParams
from tests.support.servers import EOS, group_members, groups, shared_memory, small_config, wait_until

SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(EOS,))


@asynccontextmanager
async def running(model: Path, log: Path) -> AsyncIterator[Engine]:
    engine = Engine(small_config(), log)
    with pytest.raises(EngineError, match=r"start\(\)"):
        await engine.flush()
    await engine.start(model, weight_version=1)
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_engines")
def test_work_is_measured_and_death_is_named(tiny_model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tiny_model, tmp_path / "log") as engine:
            health = await engine.health()
            assert health.alive and health.pid is not None
            assert (await engine.pulse()).running == 0
            started = await engine.cpu_seconds()
            long = SamplingParams(max_new_tokens=400)
            asked = asyncio.create_task(engine.generate(groups(32, 2), long))
            async with asyncio.timeout(60):
                while (await engine.pulse()).running == 0:
                    await asyncio.sleep(0.05)
            assert await engine.cpu_seconds() > started > 0, "its scheduler works"
            members = [process for process in group_members(health.pid) if process.pid != health.pid]
            for process in members:
                process.suspend()
            stopped = await engine.cpu_seconds()
            await asyncio.sleep(0.3)
            assert await engine.cpu_seconds() == stopped
            psutil.Process(health.pid).suspend()
            with pytest.raises(TimeoutError):
                await within(0.5, engine.cpu_seconds())
            psutil.Process(health.pid).resume()
            for process in members:
                process.resume()
            os.kill(health.pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError, match=r"log:"):
                await asked
            assert not (await engine.health()).alive
            for call in (engine.flush(), engine.pulse()):
                with pytest.raises(EngineDiedError):
                    await call
            with pytest.raises(EngineError, match="running already"):
                await engine.start(tiny_model)

    asyncio.run(run())


@pytest.mark.e2e
def test_a_cancelled_start_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        start = asyncio.create_task(Engine(small_config(), tmp_path / "log").start(tiny_model))
        await asyncio.sleep(1.0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    before = set(psutil.pids())
    asyncio.run(run())

    def gone() -> bool:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        return not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]

    assert wait_until(gone, 30)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_actor_samples_and_its_server_dies_with_it(tiny_model: Path, tmp_path: Path) -> None:
    import ray

    with ray_cluster(tmp_path / "logs"):
        actor = EngineActor.remote(small_config(), tmp_path / "log")
        ray.get(actor.start.remote(tiny_model, 1), timeout=120)
        pid = ray.get(actor.health.remote()).pid
        asked = [actor.generate.remote(groups(4, 2), SAMPLING) for _ in range(3)]
        assert [len(answers) for answers in ray.get(asked, timeout=60)] == [8, 8, 8]
        members = group_members(pid)
        traces = shared_memory(members) | {Path(members[0].environ()["TMPDIR"])}
        assert len(members) >= 3 and len(traces) == 2
        ray.kill(actor)
        assert wait_until(lambda: not group_members(pid), 20)

        def swept() -> bool:
            sweep()  # Ray kills the server's processes too, perhaps before they can clean up
            return not any(path.exists() for path in traces)

        assert wait_until(swept, 20), [path for path in traces if path.exists()]
