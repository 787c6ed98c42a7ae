"""`fp8rl train` as a user starts it: a process whose console is watched, and whose whole family is accounted for."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from fp8rl.rollout.engine.server.scratch import remove_scratch
from tests.support.paths import ROOT
from tests.support.warm_worker import MARK

FP8RL = Path(sys.executable).with_name("fp8rl")

SMALL = ["rollout.prompts_per_step=8", "rollout.group_size=4", "eval.problems=16", "checkpoint.every=2"]
"""Steps of less than a second."""

PATIENCE_S = 400.0
"""For what takes seconds on a quiet machine."""


class StartedRun:
    """One `fp8rl train` of an example into `folder`/`name`, in a session of its own like a terminal's.

    inside: a command that it is started by, such as one that gives it a network of its own. environment: additions.
    temporary: the directory for its temporary files.
    """

    def __init__(
        self, folder: Path, *arguments: str, name: str = "run", example: str = "arithmetic",
        inside: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.path = folder / name
        self._mark = uuid.uuid4().hex
        self._folders: set[str] = set()
        self.temporary = Path(tempfile.mkdtemp(prefix="fp8rl-live-"))
        self._console = folder / f"console-{self._mark}.txt"
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "WANDB_"))}
        self.started = time.monotonic()
        where = [f"run.dir={folder}", f"run.name={name}"]
        with self._console.open("wb") as output:
            self.process = subprocess.Popen(
                [*inside, FP8RL, "train", f"examples/{example}.yaml", *where, *arguments], stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
                env={**clean, **environment, MARK: self._mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def console(self) -> str:
        return self._console.read_text()

    def wait_for(self, text: str) -> None:
        """Until the console has said `text`."""
        self.wait_until(lambda: text in self.console(), f"{text!r} on the console")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.console()}"
            assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S:g} s:\n{self.console()}"
            time.sleep(0.01)

    def ends(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end; the exit code. What runs too long is shown: its console, and where its threads are."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            dump = [FP8RL.with_name("py-spy"), "dump", "--pid", str(self.driver().pid)]
            threads = subprocess.run(dump, capture_output=True, text=True).stdout
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.console()}\n{threads}") from None

    def family(self) -> list[psutil.Process]:
        """Every living process that stems from the run, by parentage or by inherited environment."""
        family = family_of(self._mark)
        for process in family:
            self._folders |= set(re.findall(r"/tmp/fp8rl-ray-\w+", command_of(process)))
        return family

    def driver(self) -> psutil.Process:
        """The run's own process, the child of the supervising one."""
        return next(child for child in psutil.Process(self.process.pid).children() if "fp8rl" in command_of(child))

    def engine(self) -> psutil.Process:
        """The main process of the SGLang server."""
        return self.member("fp8rl.rollout.engine.server.launcher")

    def member(self, named: str) -> psutil.Process:
        """The one process with this in its command line."""
        (first,) = self.members(named)
        return first

    def members(self, named: str) -> list[psutil.Process]:
        """The processes with this in their command line; one that they are about to start has it too, for a moment."""
        parents: dict[psutil.Process, int] = {}
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                if named in command_of(process):
                    parents[process] = process.ppid()
        pids = {process.pid for process in parents}
        return [process for process, parent in parents.items() if parent not in pids]

    def signal_all(self, signum: int) -> None:
        """What a terminal does on Ctrl-C: the signal goes to the foreground process group."""
        os.killpg(self.process.pid, signum)

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl, of which every line must be whole."""
        text = (self.path / "metrics.jsonl").read_text()
        assert text == "" or text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    def destroy(self) -> None:
        """Kill what is left of it, and remove the folder of its Ray cluster, with its engines' shared memory."""
        family = self.family()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until_gone(family, 10.0)
        for folder in (*self._folders, self.temporary):
            remove_scratch(Path(folder))


def family_of(mark: str) -> list[psutil.Process]:
    """Every living process with this mark in its environment, and the children of such."""
    kin = {process for process in psutil.process_iter() if _has(process, mark)}
    for process in list(kin):
        with suppress(psutil.NoSuchProcess):
            kin.update(process.children(recursive=True))
    return [process for process in kin if _lives(process)]


def of_runs(mark: str) -> list[psutil.Process]:
    """Of the family of a Ray cluster, the processes that belong to a run, and not to the cluster itself."""
    ours = r"rollout\.engine\.server\.launcher|fp8rl::watch|sglang::|ray::(TrainerActor|Engine)|fp8rl train|wandb-core"
    return [process for process in family_of(mark) if re.search(ours, command_of(process))]


def command_of(process: psutil.Process) -> str:
    """Its command line; empty if it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those still alive after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while any(_lives(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [process for process in processes if _lives(process)]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
