"""`fp8rl train` on a Ray cluster that somebody else runs, as a submitted job."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from fp8rl.rl.run.cluster.cluster import ray_cluster
from tests.support.cli_runs import MARK, PATIENCE_S, ROOT, command_of, family_of, of_runs, wait_until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GONE_WITHIN_S = 120.0
"""It takes seconds on a quiet machine."""
BIN = Path(sys.executable).parent
SMALL = ['model.path="$PWD/examples/models/tiny_qwen3_moe"', "algorithm.batch_size=16"]
"""Steps of less than a second."""


@dataclass
class Head:
    """A head node of our own, started as docs/cluster.md says, and the folder that all of it was typed in."""

    folder: Path
    environment: dict[str, str]

    @property
    def mark(self) -> str:
        return self.environment[MARK]

    def type(self, command: str) -> str:
        """What a shell of its own printed."""
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        options |= {"cwd": self.folder, "env": self.environment, "timeout": PATIENCE_S}
        return str(subprocess.run(["bash", "-c", command], **options).stdout)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """The page's commands, each in a shell of its own, in a new home; ports and folders are ours alone."""
    page = (ROOT / "docs/cluster.md").read_text()
    (block,) = re.findall(r"```bash\n((?:(?!```).)*ray job submit.*?)```", page, re.DOTALL)
    secure, start, _ = block.strip().splitlines()
    mark, home = f"test-{os.getpid()}", tmp_path_factory.mktemp("home")
    (home / "examples").symlink_to(ROOT / "examples")
    folder = tempfile.mkdtemp(prefix="fp8rl-head-", dir="/tmp")
    port, dashboard = free_port(), free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "WANDB_"))}
    environment |= {MARK: mark, "OMP_NUM_THREADS": "1", "HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
    environment["RAY_JOB_STOP_WAIT_TIME_S"] = "120"  # a busy machine is not through in Ray's three seconds
    environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{dashboard}"
    environment |= dict([re.match(r"export (\w+)=(\w+)", secure).groups()])  # type: ignore[union-attr]
    options = f"--disable-usage-stats --num-cpus=2 --port={port} --dashboard-port={dashboard} --temp-dir={folder}"
    # Its default port is one per machine, and without it the head takes no jobs.
    options += f" --dashboard-agent-listen-port={free_port()}"
    typed = Head(home, environment)
    try:
        typed.type(secure)
        started = typed.type(f"{start} {options}")
        assert "Ray runtime started" in started, started
        yield typed
    finally:
        # `ray stop` would end every Ray of the machine.
        for process in family_of(mark):
            process.kill()
        assert wait_until_gone(family_of(mark), 30.0) == []
        shutil.rmtree(folder, ignore_errors=True)


def test_a_submitted_job_shows_its_steps_and_stopped_it_leaves_no_process_and_whole_rows(head: Head) -> None:
    """By `fp8rl submit`, from the folder that relative paths are relative to. A run with an engine, on two nodes:
    test_two_nodes.py."""
    ended, said, metrics = "\nended with ", head.folder / "said", head.folder / "runs/long/metrics.jsonl"
    address = head.environment["RAY_API_SERVER_ADDRESS"]
    command = f"fp8rl submit examples/arithmetic_sft.yaml --address {address} --wait run.name=long run.steps=1000"
    while True:
        said.unlink(missing_ok=True)
        head.type(f"({' '.join([command, *SMALL])}; echo ended with $?) > said 2>&1 &")
        wait_for(lambda: "raysubmit_" in said.read_text() or ended in said.read_text(), said)
        if "No available agent" not in said.read_text():  # it comes up a little after the head
            break
        time.sleep(1.0)
    wait_for(lambda: ended in said.read_text() or (metrics.is_file() and metrics.read_text().count("\n") > 2), said)
    assert ended not in said.read_text(), said.read_text()
    busy = of_runs(head.mark)
    assert any("TrainerActor" in command_of(process) for process in busy)
    (job,) = set(re.findall(r"raysubmit_\w+", said.read_text()))
    head.type(f"ray job stop {job}")
    assert wait_until_gone(busy, GONE_WITHIN_S) == []
    wait_for(lambda: ended in said.read_text(), said)
    assert wait_until_gone(of_runs(head.mark), GONE_WITHIN_S) == []
    printed = said.read_text()
    assert f"job      {job}: STOPPED{ended}1" in printed and re.search("step +2/1000  ", printed), printed
    assert "interrupted: ending every process of the run" in printed and "Traceback" not in printed, printed
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 1 + len(rows)))


def wait_for(condition: Callable[[], object], said: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (said.is_file() and condition()):
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.2)


def test_a_run_beside_a_cluster_does_not_join_it(head: Head, tmp_path: Path) -> None:
    with ray_cluster(tmp_path):
        nodes = {process.pid for process in family_of(head.mark) if process.name() == "raylet"}
        assert len(nodes) == 1 and ray.get(ray.remote(num_cpus=0)(lambda: os.getppid()).remote()) not in nodes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
