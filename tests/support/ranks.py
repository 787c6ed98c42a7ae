"""Run a function on trainer ranks, each in a process of its own, forked from one that has imported the trainer."""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout

TIMEOUT_S = 900
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["tests.support.rank_imports"])


def run_on_ranks(config: TrainerSection, folder: Path, function: Callable[[Layout, TrainerSection], Any]) -> list[Any]:
    """The results of `function(layout, config)` in rank order; they travel through files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    store = parallel.open_store(parallel.LOOPBACK, config.world_size)
    ranks = range(config.world_size)
    return _results(folder, [partial(_on_a_rank, rank, store.port, config, function) for rank in ranks])


def in_a_fork(folder: Path, function: Callable[[], Any]) -> Any:
    """The result of a function in a process of its own, which has only imported the trainer; it is pickled."""
    (result,) = _results(folder, [function])
    return result


def _results(folder: Path, functions: Sequence[Callable[[], Any]]) -> list[Any]:
    processes = [
        WARM.Process(target=_save, args=(function, folder / f"{number}.pt"), daemon=True)
        for number, function in enumerate(functions)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    failures = "\n".join(file.read_text() for file in sorted(folder.glob("*.error")))
    assert not failures, failures
    return [torch.load(folder / f"{number}.pt", weights_only=False) for number in range(len(functions))]


def _save(function: Callable[[], Any], path: Path) -> None:
    path.unlink(missing_ok=True)  # of a call before
    try:
        torch.save(function(), path)
    except BaseException:
        path.with_suffix(".error").write_text(traceback.format_exc())
        raise


def _on_a_rank(rank: int, port: int, config: TrainerSection, function: Callable[..., Any]) -> Any:
    layout = parallel.initialize(config, rank, parallel.join_store(parallel.LOOPBACK, port, config.world_size))
    result = function(layout, config)
    parallel.shutdown()
    return result
