"""How long a step is held up by its checkpoint, what the copy takes in memory, and what writing costs the next step."""

from __future__ import annotations

import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch

from fp8rl.models.tiny import write_tiny_model
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from lab.bench.batch import random_batch
from lab.bench.measure import Result, median_ratio
from lab.bench.train import MODEL

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

T = TypeVar("T")
ROWS, WIDTH, ROUNDS = 16, 128, 5


def run() -> list[Result]:
    enable_compiler()
    config = TrainerSection(micro_batch_tokens=4096)
    layout = parallel.initialize(config)
    from fp8rl.trainer.trainer import Trainer

    batch = random_batch(ROWS, WIDTH, MODEL.vocab)
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).absolute()
        write_tiny_model(folder / "model", MODEL)
        numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
        trainer = Trainer(
            folder / "model", config, numerics, layout, seed=0, total_steps=100, max_sequence_length=WIDTH
        )

        def step() -> None:
            trainer.train_step(batch, SftObjective.of(batch))

        found = _measured(trainer, step, folder / "step")
        megabytes = sum(file.stat().st_size for file in (folder / "step").rglob("*.distcp")) / 1e6
    parallel.shutdown()
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    middle = {name: statistics.median(values) for name, values in found.items()}
    whole = [copy + write for copy, write in zip(found["copy"], found["write"], strict=True)]
    return [
        Result(
            name=f"checkpoint, what the step waits for / all of it ({parameters / 1e6:.0f}M parameters)",
            value=median_ratio(found["copy"], whole),
            bar=0.5,
            at_least=False,
            parts={"copy (s)": middle["copy"], "write and read back (s)": middle["write"], "on disk (MB)": megabytes},
        ),
        Result(
            name="train step beside the writing / alone (the same)",
            value=median_ratio(found["beside"], found["alone"]),
            bar=2.0,
            at_least=False,
            parts={"alone (s)": middle["alone"], "beside (s)": middle["beside"], "writing (s)": middle["writing"]},
        ),
        Result(
            name="checkpoint, memory held until it is written / bytes on disk (the same)",
            value=middle["held"] / megabytes,
            bar=1.1,
            at_least=False,
            parts={"held (MB)": middle["held"], "at most, while copying (MB)": middle["peak"]},
        ),
    ]


def _measured(trainer: Trainer, step: Callable[[], object], path: Path) -> dict[str, list[float]]:
    """Seconds of each part in every round, MB of the copies, and MB that the process grew by while they were made."""
    names = ("copy", "write", "alone", "writing", "beside")
    found: dict[str, list[float]] = {name: [] for name in names}
    step()
    gc.collect()
    with ThreadPoolExecutor(1) as thread:
        for index in range(1 + ROUNDS):
            before = _resident()
            with _Peak() as peak:
                copying, staged = _timed(lambda: trainer.stage(path, {}, {}))
            copies = [item.data for items in staged._plan.files.values() for item in items]
            held = sum(copy.nbytes for copy in copies if isinstance(copy, torch.Tensor)) / 1e6
            del copies
            write, _ = _timed(lambda part=staged: part.publish([part.write()]))
            alone, _ = _timed(step)
            again = trainer.stage(path, {}, {})
            writing = thread.submit(_timed, lambda part=again: part.publish([part.write()]))
            beside, _ = _timed(step)
            seconds = (copying, write, alone, writing.result()[0], beside)
            if not index:  # later rounds begin with memory that this one has left to the allocator
                found |= {"held": [held], "peak": [peak.most - before]}
                continue
            for name, value in zip(names, seconds, strict=True):
                found[name].append(value)
    return found


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


class _Peak:
    """The most MB that the process takes inside the block."""

    def __enter__(self) -> _Peak:
        self.most, self._over = _resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, _resident())


def _resident() -> float:
    return float(psutil.Process().memory_info().rss / 1e6)
