"""`fp8rl train` over two Ray nodes: the trainer on one, the engine on the other, which leaves and comes back."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.cli_runs import MARK, SMALL, StartedRun, command_of, family_of, of_runs, wait_until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RAY = Path(sys.executable).with_name("ray")
ROOT_USER = os.geteuid() == 0


@dataclass
class Machine:
    """One node. Root gives each a network namespace of its own, whose loopback is not the other's; else both are on
    this machine's loopback.

    within: the command that enters it. mark: of its processes.
    """

    address: str
    within: list[str]
    mark: str
    environment: dict[str, str]

    def start(self, *options: str) -> None:
        """A Ray node."""
        command = [*self.within, str(RAY), "start", "--disable-usage-stats", "--num-cpus=1", *options]
        done = subprocess.run(
            [*command, f"--node-ip-address={self.address}"],
            env={**self.environment, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert "Ray runtime started" in done.stdout, done.stdout

    def leave(self) -> None:
        """Every process at once, as when the power goes."""
        for process in family_of(self.mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert wait_until_gone(family_of(self.mark), 30.0) == []


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine, str]]:
    """Two nodes of one cluster, the second with the resource `engines`, and the cluster's address."""
    tag, folder = secrets.token_hex(3), tempfile.mkdtemp(prefix="fp8rl-nodes-", dir="/tmp")
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "WANDB_"))}
    clean |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    # A node that is gone is noticed in a few seconds instead of twenty.
    clean |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
    spaces = [f"fp8rl-{tag}-{side}" for side in "ab"] if ROOT_USER else []
    addresses = ["10.213.77.1", "10.213.77.2"] if ROOT_USER else ["127.0.0.2", "127.0.0.3"]
    within = [["ip", "netns", "exec", space] for space in spaces] or [[], []]
    left, right = (
        Machine(address, enter, f"{tag}-{side}", clean)
        for address, enter, side in zip(addresses, within, "ab", strict=True)
    )
    try:
        connect(spaces, addresses)
        head = f"{left.address}:{20000 + secrets.randbelow(10000)}"
        left.start("--head", f"--port={head.rpartition(':')[2]}", f"--temp-dir={folder}", "--include-dashboard=false")
        right.start(f"--address={head}", '--resources={"engines": 1}')
        yield left, right, head
    finally:
        right.leave()
        left.leave()
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def connect(spaces: list[str], addresses: list[str]) -> None:
    """A cable between two namespaces."""
    for space in spaces:
        subprocess.run(["ip", "netns", "add", space], check=True)
    if spaces:
        pair = ["ip", "link", "add", "cable0", "netns", spaces[0], "type", "veth", "peer", "name", "cable1"]
        subprocess.run([*pair, "netns", spaces[1]], check=True)
    for index, (space, address) in enumerate(zip(spaces, addresses, strict=False)):
        inside = ["ip", "-n", space]
        subprocess.run([*inside, "address", "add", f"{address}/24", "dev", f"cable{index}"], check=True)
        for device in ("lo", f"cable{index}"):
            subprocess.run([*inside, "link", "set", device, "up"], check=True)


def test_trainer_and_engine_on_two_nodes_one_of_which_leaves(
    machines: tuple[Machine, Machine, str], tmp_path: Path
) -> None:
    left, right, head = machines
    nodes = [f"cluster.trainer_nodes={left.address}", "cluster.engine_nodes=engines", "sync.transport=distributed"]
    inside = {key: value for key, value in left.environment.items() if key.startswith("RAY_AUTH")}
    settings = [*SMALL, *nodes, "run.steps=1000", "eval.problems=0"]
    run = StartedRun(tmp_path, *settings, inside=left.within, environment=inside | {"RAY_ADDRESS": head})
    try:
        run.wait_until(lambda: (run.path / "metrics.jsonl").is_file() and len(run.rows()) > 3, "three steps")
        (engine,) = [each for each in of_runs(right.mark) if "engine.server.launcher" in command_of(each)]
        assert any("ray::TrainerActor" in command_of(process) for process in of_runs(left.mark))
        assert engine.environ()["NO_PROXY"] == right.address, "where it listens"
        if ROOT_USER:
            trainer, server = (os.readlink(f"/proc/{pid}/ns/net") for pid in (run.process.pid, engine.pid))
            assert trainer != server

        right.leave()
        run.wait_for("engine 0 is lost and replaced")
        run.wait_for("engine 0 waits for a node: found no room on the nodes that are up")
        seen = len(run.rows())
        right.start(f"--address={head}", '--resources={"engines": 1}')
        run.wait_until(lambda: len(run.rows()) > seen + 1, "steps with the node that is back")

        run.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert run.ends(60) == 130
        left_over = [process for machine in (left, right) for process in of_runs(machine.mark)]
        assert wait_until_gone(left_over, 15.0 - (time.monotonic() - began)) == []
        rows = run.rows()
        assert {row["mismatch/train_rollout_logprob_abs_diff_max"] for row in rows[1:]} == {0.0}
        assert {row["sync/mismatched_tensors"] for row in rows} == {0.0}
        assert sum(row.get("rollout/engines_replaced", 0.0) for row in rows) == 1.0
        assert run.console().count("waits for a node") == 1, "said once"
    finally:
        run.destroy()
