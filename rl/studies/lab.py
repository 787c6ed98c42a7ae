"""What a study works with: its seeds, its scratch folder, and processes to measure in."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from trainer.config import TrainerConfig

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
        results: list[T] = []
        with _processes(AT_ONCE) as pool:
            for done in pool.map(_call, [(function, job) for job in jobs]):
                results.append(done)
                self.say(f"{what}: {len(results)} of {len(jobs)}")
        return results

    def alone(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returns in a process of its own."""
        return in_own_process(function, *args, **kwargs)


def on_ranks(config: TrainerConfig, function: Callable[..., T], *args: Any) -> list[T]:
    """What `function(layout, *args)` returns on each rank of a trainer, in rank order, each in a process of its own."""
    from trainer import parallel

    store = parallel.open_store(parallel.LOOPBACK, config.world_size)
    with _processes(config.world_size) as pool:
        ranks = [pool.submit(_rank, rank, store.port, config, function, args) for rank in range(config.world_size)]
        return [rank.result() for rank in ranks]


def in_own_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function`, which can be pickled, returns in a fresh process; raises what it raises there."""
    with _processes(1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def _processes(count: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_start)


def _start() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def _call(job: tuple[Callable[..., T], tuple[Any, ...]]) -> T:
    function, args = job
    return function(*args)


def _rank(rank: int, port: int, config: TrainerConfig, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    from rl.studies import live
    from trainer import parallel

    with live.world(config, rank, parallel.join_store(parallel.LOOPBACK, port, config.world_size)) as layout:
        return function(layout, *args)
