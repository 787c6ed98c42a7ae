"""The processes of a server, which are one process group: finds and ends them. Chooses the port that they listen at."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from fp8rl.numerics.core.errors import user_error
from fp8rl.rollout.engine.server.scratch import remove_queues, remove_scratch
from fp8rl.rollout.types import EngineError

_KILLED_S = 60.0  # a busy machine takes its time to free an engine's memory
_FIRST_PORT = 16000


def end_group(leader: subprocess.Popen[bytes], scratch: Path, pids: set[int], grace_s: float) -> None:
    """End a server and remove its temporary files. After `grace_s` kill it. pids: the ids of processes that it had."""
    pids = pids | {process.pid for process in group_members(leader.pid)}
    if leader.poll() is None and grace_s > 0:
        leader.terminate()
        _wait_until_gone(leader.pid, grace_s)
    assert leader.stdin is not None
    with suppress(BrokenPipeError):
        leader.stdin.close()  # the lifeline: whoever is left dies now
    _wait_until_gone(leader.pid, 1.0)
    if survivors := kill_group(leader.pid, scratch, pids):
        raise EngineError(f"engine processes {[p.pid for p in survivors]} survived SIGKILL. End them by hand.")
    leader.wait(_KILLED_S)


def kill_group(group: int, scratch: Path, pids: Collection[int] = ()) -> list[psutil.Process]:
    """Kill a server's processes. Remove their files only then, because one that starts would make them again. Return
    the processes that survive. pids: the ids of processes that it had before."""
    pids = {*pids, *(process.pid for process in group_members(group))}
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    survivors = _wait_until_gone(group, _KILLED_S)
    remove_queues(pids)
    remove_scratch(scratch)
    return survivors


def group_members(group: int) -> list[psutil.Process]:
    """Return all processes of a process group, also zombies."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                members.append(process)
    return members


def _wait_until_gone(group: int, timeout_s: float) -> list[psutil.Process]:
    """Wait for the end of all processes of a group. Return those that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    members = group_members(group)
    while (members := [each for each in members if _lives(each)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return members


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def claim_port(port: int | None, host: str) -> int:
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
    expected, remedy = "a port on which no other program listens", "Choose another, or leave it out to take a free one."
    raise user_error("--port (rollout.port of a spec)", port, expected, remedy)
