"""Memory, descriptors, threads and temporary files of a long run, and of a server that is asked often: they must level
off."""

from __future__ import annotations

import getpass
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from lab.bench.measure import Result

COMMAND = Path(sys.executable).with_name("fp8rl")
STEPS, REQUESTS, AT_ONCE = 300, 2800, 8
KINDS = {"TrainerActor": "trainer", "fp8rl.rollout.engine.server.launcher": "engine", "sglang": "engine"}
"""The kind of a process by what it calls itself, or by its command where it could not take a name."""
_EVERY_S = 2.0


def run() -> Iterator[Result]:
    yield from _results("300 steps", _train())
    yield from _results("2,800 requests", _serve())


@dataclass
class Watch:
    """Holdings of a command's processes, look by look: name of the kind and of the measure -> values."""

    seen: dict[str, list[float]] = field(default_factory=dict)

    def look(self, leader: psutil.Process, folder: Path) -> None:
        sums: dict[str, float] = {}
        for process in (leader, *leader.children(recursive=True)):
            try:
                name = " ".join((process.name(), *process.cmdline()))
                kind = next((kind for mark, kind in KINDS.items() if mark in name), "driver and others")
                memory = process.memory_info()
                held = {
                    "private memory (MB)": (memory.rss - memory.shared) / 1e6,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
            except psutil.Error:
                continue  # it has just ended
            for measure, value in held.items():
                sums[f"{kind}: {measure}"] = sums.get(f"{kind}: {measure}", 0.0) + value
        sums["temporary files"] = sum(len(files) for _, _, files in os.walk(folder))
        for key, total in sums.items():
            self.seen.setdefault(key, []).append(total)


def _results(what: str, watch: Watch) -> list[Result]:
    """The last quarter of the time against the second."""
    results = []
    for key, values in sorted(watch.seen.items()):
        quarter = len(values) // 4
        if quarter == 0:
            continue
        early, late = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
        parts = {"second quarter": early, "last quarter": late, "highest": max(values)}
        ratio = late / early if early else 1.0
        results.append(Result(f"{what}: {key}, last / second quarter", ratio, 1.1, at_least=False, parts=parts))
    return results


def _train() -> Watch:
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"run.dir={folder}/runs", "run.name=long", f"run.steps={STEPS}", "rollout.prompts_per_step=8"]
        command = [COMMAND, "train", "examples/arithmetic.yaml", *overrides, "eval.problems=8", "checkpoint.every=50"]
        with _watched(command, Path(folder) / "tmp") as (process, watch):
            for _ in process.stdout or ():
                pass
        if process.returncode:
            raise RuntimeError(f"fp8rl train: found exit code {process.returncode}, expected 0")
        return watch


def _serve() -> Watch:
    with tempfile.TemporaryDirectory() as folder:
        command = [COMMAND, "serve", "examples/models/tiny_qwen3_moe"]
        with _watched(command, Path(folder) / "tmp") as (process, watch):
            address = next(
                filter(None, (re.search(r"URL=(\S+) OPENAI_API_KEY=(\S+)", line) for line in process.stdout or ()))
            )
            url, key = address.groups()
            watch.seen.clear()  # what was held while it started
            headers = {"Authorization": f"Bearer {key}"}
            with (
                httpx.Client(timeout=120.0, headers=headers, trust_env=False) as client,
                ThreadPoolExecutor(AT_ONCE) as pool,
            ):
                list(pool.map(lambda number: _ask(client, url, number), range(REQUESTS)))
            process.send_signal(signal.SIGINT)
        return watch


def _ask(client: httpx.Client, url: str, number: int) -> None:
    draw = random.Random(number)
    terms = draw.choices("123456789", k=draw.randint(2, 20))
    body = {"model": "tiny_qwen3_moe", "prompt": "+".join(terms) + "=", "max_tokens": draw.randint(1, 40)}
    client.post(f"{url}/completions", json=body | {"logprobs": 1, "seed": number}).raise_for_status()


@contextmanager
def _watched(command: list[object], temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Watch]]:
    """A command with temporary files of its own, looked at until it ends."""
    temporary.mkdir()
    watch, ended = Watch(), threading.Event()
    compiled = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"  # of earlier runs
    environment = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True, env=environment)
    leader = psutil.Process(process.pid)

    def look() -> None:
        while not ended.wait(_EVERY_S) and process.poll() is None:
            watch.look(leader, temporary)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield process, watch
        process.wait(120.0)
    finally:
        ended.set()
        looking.join()
        if process.poll() is None:
            process.terminate()
            process.wait(60.0)
