"""The engine and the Ray actor around it: versions, a start that is cancelled, and death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from fp8rl.rl.run.cluster.cluster import ray_cluster
from fp8rl.rollout.engine.actor import Engine, EngineActor, check_versions
from fp8rl.rollout.engine.server.scratch import sweep
from fp8rl.rollout.types import EngineError, SamplingParams, StaleWeightsError, Trajectory
from tests.support.servers import EOS, group_members, groups, shared_memory, small_config, wait_until

SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(EOS,))


def sampled_at(*versions: int) -> Trajectory:
    return Trajectory([1], list(versions), [-1.0] * len(versions), True, list(versions), 0, 0)


def test_stale_tokens_are_counted_by_version() -> None:
    trajectories = [sampled_at(4, 5, 5), sampled_at(4)]
    with pytest.raises(StaleWeightsError, match=r"2 of 4 tokens .* 2 at version 4, 2 at version 5, .* at version 5"):
        check_versions(trajectories, 5, 5)
    with pytest.raises(StaleWeightsError, match=r"2 of 4 tokens .* expected all at versions 2 to 4"):
        check_versions(trajectories, 2, 4)
    check_versions([*trajectories, sampled_at()], 4, 5)


@pytest.mark.e2e
def test_a_cancelled_start_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        engine = Engine(small_config(), tmp_path / "log")
        with pytest.raises(EngineError, match=r"start\(\)"):
            await engine.flush()
        start = asyncio.create_task(engine.start(tiny_model))
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
