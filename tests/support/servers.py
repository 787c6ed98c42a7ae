"""A small SGLang server: its settings, prompts for it, its processes, and one call to it."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil

from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Endpoint, Group, Problem, Prompt

Result = TypeVar("Result")

EOS = 7


def small_config(**changes: object) -> RolloutSection:
    return RolloutSection(**{"context_length": 512, "max_total_tokens": 8192, **changes})


def groups(count: int, size: int) -> list[Group]:
    """Groups of `size` answers to different prompts."""
    return [
        Group(Prompt(Problem(f"q{i}", f"#### {i}"), [10 + i, 20 + i]), tuple(range(i * size, (i + 1) * size)))
        for i in range(count)
    ]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def group_members(leader: int) -> list[psutil.Process]:
    """Live processes of a process group, found without the code under test."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files that SGLang shares between the processes and that nobody has removed yet."""
    paths = {Path(region.path) for process in processes for region in process.memory_maps()}
    return {path for path in paths if path.name.startswith("sglang_") and path.exists()}


def use(endpoint: Endpoint, action: Callable[[EngineClient], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        async with EngineClient(endpoint, timeout_s=60) as client:
            return await action(client)

    return asyncio.run(run())
