"""Run a function on trainer ranks, each in a process of its own, forked from one that has imported the trainer."""

import multiprocessing
import traceback
from collections.abc import Callable
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
    processes = [
        WARM.Process(target=_rank, args=(rank, store.port, config, folder, function), daemon=True)
        for rank in range(config.world_size)
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
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(config.world_size)]


def in_a_fork(folder: Path, function: Callable[[], Any]) -> Any:
    """The result of a function in a process of its own, which has only imported the trainer; it is pickled."""
    process = WARM.Process(target=_saved, args=(function, folder / "result.pt"), daemon=True)
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    return torch.load(folder / "result.pt", weights_only=False)


def _saved(function: Callable[[], Any], path: Path) -> None:
    torch.save(function(), path)


def _rank(rank: int, port: int, config: TrainerSection, folder: Path, function: Callable[..., Any]) -> None:
    try:
        store = parallel.join_store(parallel.LOOPBACK, port, config.world_size)
        layout = parallel.initialize(config, rank, store)
        torch.save(function(layout, config), folder / f"{rank}.pt")
        parallel.shutdown()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise
