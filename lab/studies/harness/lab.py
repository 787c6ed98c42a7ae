"""The means of a study: its seeds, its scratch folder, models and data, processes to measure in, and runs of the
command itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fp8rl.rl.run.interrupts import interruptible

if TYPE_CHECKING:
    from fp8rl.trainer.config import TrainerSection

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = 2


@dataclass
class Lab:
    """One run of one study."""

    quick: bool
    """Smaller sizes, for a look; no verdicts."""
    seeds: tuple[int, ...]
    """The measurements are repeated with each."""
    scratch: Path
    """A folder of the run's own, gone afterwards."""
    say: Callable[[str], None]
    specs: dict[str, str] = field(default_factory=dict)
    """Name to digest of each quantization spec that was measured; studies add to it."""

    def each(
        self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], what: str, at_once: int = AT_ONCE
    ) -> list[T]:
        """`function` of each job's arguments, in processes of one thread each; results in the order of the jobs.

        A process takes one job after the other, as starting one costs as much as a small job: a function leaves
        nothing behind that another would compute differently with.
        """
        with _processes(at_once) as pool:
            running = [pool.submit(_run, partial(function, *job)) for job in jobs]
            for count, done in enumerate(as_completed(running), start=1):
                done.result()  # the first failure ends the others
                self.say(f"{what}: {count} of {len(jobs)}")
            return [job.result() for job in running]

    def alone(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a process of its own."""
        return in_own_process(function, *args, **kwargs)


def on_ranks(config: TrainerSection, function: Callable[..., T], *args: Any) -> list[T]:
    """Return what `function(layout, *args)` gives on each rank of a trainer, in rank order, each in its own process."""
    from fp8rl.trainer.distributed import parallel

    store = parallel.open_store(parallel.LOOPBACK, config.world_size)
    with _processes(config.world_size) as pool:
        calls = [partial(_rank, rank, store.port, config, function, args) for rank in range(config.world_size)]
        ranks = [pool.submit(_run, call) for call in calls]
        return [rank.result() for rank in ranks]


def in_own_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, which can be pickled, in a fresh process; raise what it raises there."""
    with _processes(1) as pool:
        return pool.submit(_run, partial(function, *args, **kwargs)).result()


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes whose jobs are ended at once, and close what they opened, if one fails or this one is interrupted."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start)
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; who started this process tells it
    signal.signal(signal.SIGTERM, _end_between_jobs)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def _end_between_jobs(signum: int, frame: FrameType | None) -> None:
    """Start no more. Raised outside of a job, an interrupt would break the pool and end the other processes hard."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _run(job: Callable[[], T]) -> T:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:  # it was queued here before this process was told
        raise KeyboardInterrupt
    with interruptible():
        return job()


def _rank(rank: int, port: int, config: TrainerSection, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    from fp8rl.trainer.distributed import parallel
    from lab.studies.harness import live

    with live.world(config, rank, parallel.join_store(parallel.LOOPBACK, port, config.world_size)) as layout:
        return function(layout, *args)


def trained(
    spec: Path,
    folder: Path,
    name: str,
    settings: Mapping[str, Any],
    *,
    resume: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The metrics of a run of `spec`, which is left in `folder`: a row for each step, the first of them before it.

    resume: from the last checkpoint of a run that has begun. environment: in place of this process's variables.

    Raises:
        RuntimeError: it failed.
    """
    begun = "--resume" if resume else "--overwrite"
    command = [str(Path(sys.executable).with_name("fp8rl")), "train", str(spec), begun]
    own = {"run.dir": folder, "run.name": name, "tracking.wandb.mode": "disabled"}
    command += [f"{key}={value}" for key, value in (own | dict(settings)).items()]
    out: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **out) as run:
        try:
            errors = run.communicate()[1]
        except KeyboardInterrupt:
            run.terminate()
            run.communicate()  # until it has ended its engine
            raise
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}: {errors[-2000:]}")
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
