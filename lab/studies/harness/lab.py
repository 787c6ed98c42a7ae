"""What a study works with: its seeds, its scratch folder, and processes to measure in."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fp8rl.rl.run.interrupts import interruptible, is_ending

if TYPE_CHECKING:
    from fp8rl.trainer.config import TrainerSection

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = 2


@dataclass
class Lab:
    """One run of one study.

    Attributes:
        quick: smaller sizes, for a look; no verdicts.
        seeds: the measurements are repeated with each.
        scratch: a folder of the run's own, gone afterwards.
        say: told what is going on.
        specs: name to digest of each quantization spec that was measured; studies add to it.
    """

    quick: bool
    seeds: tuple[int, ...]
    scratch: Path
    say: Callable[[str], None]
    specs: dict[str, str] = field(default_factory=dict)

    def each(self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], what: str) -> list[T]:
        """`function` of each job's arguments, in two processes of one thread each; results in the order of the jobs.

        A process takes one job after the other, as starting one costs as much as a small job: a function leaves
        nothing behind that another would compute differently with.
        """
        with _processes(AT_ONCE) as pool:
            running = [pool.submit(_run, partial(function, *job)) for job in jobs]
            for count, done in enumerate(as_completed(running), start=1):
                done.result()  # the first failure ends the others
                self.say(f"{what}: {count} of {len(jobs)}")
            return [job.result() for job in running]

    def alone(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returns in a process of its own."""
        return in_own_process(function, *args, **kwargs)


def on_ranks(config: TrainerSection, function: Callable[..., T], *args: Any) -> list[T]:
    """What `function(layout, *args)` returns on each rank of a trainer, in rank order, each in a process of its own."""
    from fp8rl.trainer.distributed import parallel

    store = parallel.open_store(parallel.LOOPBACK, config.world_size)
    with _processes(config.world_size) as pool:
        calls = [partial(_rank, rank, store.port, config, function, args) for rank in range(config.world_size)]
        ranks = [pool.submit(_run, call) for call in calls]
        return [rank.result() for rank in ranks]


def in_own_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function`, which can be pickled, returns in a fresh process; raises what it raises there."""
    with _processes(1) as pool:
        return pool.submit(_run, partial(function, *args, **kwargs)).result()


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Where one fails, or this one is interrupted, the jobs of all are ended at once, and close what they opened."""
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
    if is_ending():  # it was queued here before this process was told
        raise KeyboardInterrupt
    with interruptible():
        return job()


def _rank(rank: int, port: int, config: TrainerSection, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    from fp8rl.trainer.distributed import parallel
    from lab.studies.harness import live

    with live.world(config, rank, parallel.join_store(parallel.LOOPBACK, port, config.world_size)) as layout:
        return function(layout, *args)
