"""The life of a server process and of the actor around it: it comes up or says why not, and never stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from fp8rl.rl.run.cluster.cluster import ray_cluster
from fp8rl.rl.run.engines import serving
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.engine.server import scratch as scratch_module
from fp8rl.rollout.engine.server.scratch import RAY, SHARED, make_scratch, remove_queues, sweep
from fp8rl.rollout.types import EngineDiedError, EngineError, SamplingParams
from tests.support.servers import EOS, group_members, groups, shared_memory, small_config, wait_until

# The owner: starts a server in a second thread that ends at once, as a Ray actor's may, prints the server's pid, waits.
OWNER = """
import asyncio, sys, threading, time
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import Engine
config = RolloutSection(context_length=512, max_total_tokens=8192)
engine = Engine(config, sys.argv[2])
thread = threading.Thread(target=lambda: asyncio.run(engine.start(sys.argv[1])))
thread.start()
thread.join()
time.sleep(1.0)
print(engine.pid, flush=True)
time.sleep(600)
"""


def launched_since(before: set[int]) -> list[psutil.Process]:
    """Live engine processes that were not among the process ids `before`, and are descendants of this one."""
    descendants = psutil.Process().children(recursive=True)
    return [p for p in descendants if p.pid not in before and p.status() != psutil.STATUS_ZOMBIE]


def test_only_the_scratch_of_the_dead_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_module, "SHARED", tmp_path)
    scratch, lock = make_scratch()
    shared = tmp_path / f"sglang_loads_{scratch.name}_1a2b.shm"
    shared.touch()
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    try:
        sweep()
        assert scratch.is_dir() and shared.exists()
    finally:
        holder.kill()
        holder.wait()
    sweep()
    assert not scratch.exists() and not shared.exists()


def test_what_ranks_talk_through_goes_with_their_processes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_module, "SHARED", tmp_path)
    for name in ("sgl_shm_mq_17_1a2b3c4d", "sgl_shm_mq_171_1a2b3c4d", "sglang_loads_17_x.shm", "torch_17_1_2"):
        (tmp_path / name).touch()
    remove_queues([17, 18])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"sgl_shm_mq_171_1a2b3c4d", "sglang_loads_17_x.shm", "torch_17_1_2"}


def test_an_engines_shared_memory_goes_with_the_folder_of_its_dead_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_module, "SHARED", tmp_path)
    cluster, lock = make_scratch(RAY, str(tmp_path))
    (cluster / "tmp").mkdir()
    engine, own = make_scratch(parent=str(cluster / "tmp"))
    shared = tmp_path / f"sglang_loads_{engine.name}_1a2b.shm"
    shared.touch()
    sweep(RAY, str(tmp_path))
    assert engine.is_dir() and shared.exists(), "its owner lives"
    os.close(own)
    os.close(lock)
    sweep(RAY, str(tmp_path))
    assert not cluster.exists() and not shared.exists()


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_engines")
def test_the_configured_port_is_used_and_death_is_detected_with_the_log_quoted(
    tiny_model: Path, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = Engine(small_config(port=port), tmp_path / "engine.log")
    with asyncio.Runner() as runner:
        endpoint = runner.run(engine.start(tiny_model))
        try:
            engine.check()
            pid = engine.pid
            assert endpoint.url == f"http://127.0.0.1:{port}"
            members = group_members(pid)
            assert len(members) >= 3
            listening = {c.laddr.ip for p in members for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
            assert listening == {"127.0.0.1"}
            traces = [engine._scratch, *shared_memory(members)]
            assert len(traces) > 1 and engine._scratch.is_dir()
            next(p for p in members if "scheduler" in " ".join(p.cmdline())).kill()
            assert wait_until(lambda: not group_members(pid), 30)
            for asked in (engine.weight_version, engine.flush):
                with pytest.raises(EngineDiedError, match=r"engine\.log:\n(.|\n)*scheduler"):
                    runner.run(asked())
        finally:
            runner.run(engine.stop())
    assert group_members(pid) == []
    assert not any(path.exists() for path in traces)


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_engines")
def test_a_start_that_fails_says_why_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny_model / "config.json").read_text())
    before = set(psutil.pids())
    with pytest.raises(EngineDiedError, match="(?i)weights|safetensors|model"):
        asyncio.run(Engine(small_config(), tmp_path / "engine.log").start(broken))
    assert launched_since(before) == []


@pytest.mark.e2e
def test_a_start_that_takes_too_long_is_ended(tiny_model: Path, tmp_path: Path) -> None:
    before = set(psutil.pids())
    config = small_config().model_copy(update={"start_timeout_s": 1.0})
    with pytest.raises(EngineError, match=r"did not answer within 1 s \(rollout\.start_timeout_s\)"):
        asyncio.run(Engine(config, tmp_path / "engine.log").start(tiny_model))
    assert launched_since(before) == []


@pytest.mark.e2e
@pytest.mark.parametrize("started", [True, False])
def test_the_server_dies_with_its_owner_also_during_the_start(started: bool, tiny_model: Path, tmp_path: Path) -> None:
    """The owner is killed with SIGKILL; the thread that started the server had ended long before."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tiny_model), str(tmp_path / "engine.log")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        if started:
            pid = int(owner.stdout.readline())
            members = group_members(pid)
            assert len(members) >= 3 and shared_memory(members), "the server must outlive the thread that started it"
        else:
            assert wait_until(lambda: psutil.Process(owner.pid).children(), 90)
            time.sleep(1.0)
            pid = psutil.Process(owner.pid).children()[0].pid
        scratch = Path(psutil.Process(pid).environ()["TMPDIR"])
        assert scratch.is_dir()
        owner.kill()
        assert wait_until(lambda: not (group_members(pid) or scratch.exists()), 20), "its watch has removed it"
        assert not list(SHARED.glob(f"*{scratch.name}*"))
    finally:
        owner.kill()
        owner.wait()


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["api_key", "admin_api_key"])
def test_a_server_that_others_reach_does_not_start_without_its_keys(missing: str) -> None:
    keys = {"api_key": "a", "admin_api_key": "b", missing: ""}
    request = {"arguments": ["--host", "192.0.2.7"], "architecture": "", "fork": True, **keys}
    command, asked = [sys.executable, "-P", "-m", "fp8rl.rollout.engine.server.launcher"], json.dumps(request) + "\n"
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "found fewer than two keys for an engine at 192.0.2.7" in done.stderr and "Traceback" not in done.stderr


# Its worker makes a file in shared memory, which is beside its scratch directory here, until it is killed.
SERVER = """
import os, subprocess, sys
from pathlib import Path
from fp8rl.rollout.engine.server import launcher, scratch
folder = Path(os.environ["TMPDIR"])
scratch.SHARED = folder.parent
launcher.start_watch()
file = scratch.SHARED / f"sglang_loads_{folder.name}_1a2b.shm"
worker = subprocess.Popen([sys.executable, "-c", "while True: open(__import__('sys').argv[1], 'a').close()", file])
while not file.exists():
    pass
print(worker.pid, flush=True)
worker.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["killed", "stopped and left by its owner"])
def test_the_workers_of_a_server_go_with_it(ending: str, tmp_path: Path) -> None:
    """Also those that have not asked for its death signal yet, and those of a server that could not kill them. After
    them go their files, which they would make again."""
    (tmp_path / "scratch").mkdir()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
    server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **pipes)
    assert server.stdin is not None and server.stdout is not None
    worker = psutil.Process(int(server.stdout.readline()))
    if ending == "killed":
        server.kill()
    else:
        server.send_signal(signal.SIGSTOP)
        server.stdin.close()
    worker.wait(30)
    server.wait(30)
    assert wait_until(lambda: not list(tmp_path.iterdir()), 30)


SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(EOS,))


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
    assert wait_until(lambda: not launched_since(before), 30)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.usefixtures("warm_engines")
def test_the_actor_samples_and_its_server_dies_with_it(tiny_model: Path, tmp_path: Path) -> None:
    with ray_cluster(tmp_path / "logs"):
        actor = serving.EngineActor.remote(small_config(), tmp_path / "log")
        ray.get(actor.start.remote(tiny_model, 1), timeout=120)
        pid, scratch = ray.get(actor.__ray_call__.remote(lambda engine: (engine.pid, engine._scratch)))
        asked = [actor.generate.remote(groups(4, 2), SAMPLING) for _ in range(3)]
        assert [len(answers) for answers in ray.get(asked, timeout=60)] == [8, 8, 8]
        members = group_members(pid)
        traces = shared_memory(members) | {scratch}
        assert len(members) >= 3 and len(traces) == 2
        ray.kill(actor)
        assert wait_until(lambda: not group_members(pid), 20)
        assert wait_until(lambda: not any(path.exists() for path in traces), 20), "its watch has removed them"
