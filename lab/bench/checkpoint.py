"""Costs of a checkpoint: the time that a step waits for it, the copy's memory, and the next step's time beside it."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fp8rl.rl.algorithms.sft import SftObjective
from lab.bench.measure import Result, median_ratio
from lab.bench.memory import watched
from lab.bench.trainers import one_rank, random_batch
from tests.support.trainers import stage_checkpoint

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

T = TypeVar("T")
ROUNDS = 5


def run() -> Iterator[Result]:
    batch = random_batch(16)
    with one_rank() as make, tempfile.TemporaryDirectory(dir=".") as name:
        trainer, path = make(), Path(name).absolute() / "step"
        found = _measured(trainer, lambda: trainer.train_step(batch, SftObjective.of(batch)), path)
        megabytes = sum(file.stat().st_size for file in path.rglob("*.distcp")) / 1e6
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    middle = {name: statistics.median(values) for name, values in found.items()}
    whole = [copy + write for copy, write in zip(found["copy"], found["write"], strict=True)]
    yield Result(
        name=f"checkpoint, what the step waits for / all of it ({parameters / 1e6:.0f}M parameters)",
        value=median_ratio(found["copy"], whole),
        bar=0.5,
        at_least=False,
        parts={"copy (s)": middle["copy"], "write and read back (s)": middle["write"], "on disk (MB)": megabytes},
    )
    yield Result(
        name="train step beside the writing / alone (the same)",
        value=median_ratio(found["beside"], found["alone"]),
        bar=2.0,
        at_least=False,
        parts={"alone (s)": middle["alone"], "beside (s)": middle["beside"], "writing (s)": middle["writing"]},
    )
    yield Result(
        name="checkpoint, memory held until it is written / bytes on disk (the same)",
        value=middle["held"] / megabytes,
        bar=1.1,
        at_least=False,
        parts={"held (MB)": middle["held"], "at most, while copying (MB)": middle["peak"]},
    )


def _measured(trainer: Trainer, step: Callable[[], object], path: Path) -> dict[str, list[float]]:
    """Seconds of each part in every round, MB of the copies, and MB that the process grew by while they were made."""
    names = ("copy", "write", "alone", "writing", "beside")
    found: dict[str, list[float]] = {name: [] for name in names}
    step()
    gc.collect()
    with ThreadPoolExecutor(1) as thread:
        for index in range(1 + ROUNDS):
            with watched("VmRSS") as peak:
                copying, staged = _timed(lambda: stage_checkpoint(trainer, path, {}))
            copies = [item.data for items in staged._plan.files.values() for item in items]
            held = sum(copy.nbytes for copy in copies if isinstance(copy, torch.Tensor)) / 1e6
            del copies
            write, _ = _timed(partial(_write, staged))
            alone, _ = _timed(step)
            again = stage_checkpoint(trainer, path, {})
            writing = thread.submit(_timed, partial(_write, again))
            beside, _ = _timed(step)
            seconds = (copying, write, alone, writing.result()[0], beside)
            if not index:  # later rounds begin with memory that this one has left to the allocator
                found |= {"held": [held], "peak": [(peak.most - peak.first) / 1e6]}
                continue
            for name, value in zip(names, seconds, strict=True):
                found[name].append(value)
    return found


def _write(staged: Any) -> None:
    staged.publish([staged.write()])


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result
