"""What a pass takes of memory where logits are made in chunks, and of time where layers are computed once more."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from fp8rl.models.tiny import TinyModel, write_tiny_model
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import Recompute, TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout
from lab.bench.batch import random_batch
from lab.bench.measure import Result, interleaved, median_ratio

WORDS = TinyModel(layers=1, hidden=256, heads=2, kv_heads=2, intermediate=256, experts=0, top_k=0, vocab=151_936)
TOKENS, WIDTH, CHUNK = 8192, 512, 1024
PLAIN_TOKENS = (1024, 2048)
"""Passes without chunks that are measured: one of 8,192 tokens takes more memory than a machine may have."""
LAYERS = TinyModel(layers=4, hidden=512, heads=4, kv_heads=2, intermediate=512, experts=8, top_k=2, vocab=1024)
ROWS, SHORT, ROUNDS = 64, 128, 5
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Without these the C library keeps what is freed."""


def run() -> Iterator[Result]:
    yield _peaks()
    yield _seconds()


def _peaks() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_tiny_model(path, WORDS)
        few, more = (_in_own_process(path, tokens, "none", TOKENS) for tokens in PLAIN_TOKENS)
        chunked = _in_own_process(path, TOKENS, "none", CHUNK)
    # Without chunks the peak grows by the same bytes for each token.
    plain = more + (more - few) * (TOKENS - PLAIN_TOKENS[1]) / (PLAIN_TOKENS[1] - PLAIN_TOKENS[0])
    return Result(
        name=f"peak memory of a pass of {TOKENS:,} tokens, logits in chunks of {CHUNK:,} / at once "
        f"(vocabulary {WORDS.vocab:,}, hidden {WORDS.hidden})",
        value=chunked / plain,
        bar=0.2,
        at_least=False,
        parts={
            "in chunks (MB)": chunked / 1e6,
            "at once, calculated from the next two (MB)": plain / 1e6,
            **{f"{tokens:,} at once (MB)": peak / 1e6 for tokens, peak in zip(PLAIN_TOKENS, (few, more), strict=True)},
        },
    )


def _in_own_process(path: Path, tokens: int, recompute: str, chunk: int) -> float:
    """Bytes that a pass adds to its process at its peak."""
    command = [sys.executable, "-m", "lab.bench.memory", str(path), str(tokens), recompute, str(chunk)]
    done = subprocess.run(command, env=os.environ | GIVES_BACK, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def _one(path: Path, tokens: int, recompute: str, chunk: int) -> float:
    layout = parallel.initialize(TrainerSection())
    keys = {"micro_batch_tokens": tokens, "recompute": recompute, "head_chunk_tokens": chunk}
    trainer = _trainer(path, layout, WIDTH, **keys)
    for rows in (1, tokens // WIDTH):  # the first makes what is made once and for all
        batch = random_batch(rows, WIDTH, trainer.definition.sizes.vocab_size)
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _status("VmRSS")
        trainer.forward_backward(batch, SftObjective.of(batch))
        peak = _status("VmHWM") - before
    parallel.shutdown()
    return peak


def _status(name: str) -> int:
    """Bytes of this process, by their name in its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _seconds() -> Result:
    enable_compiler()
    layout = parallel.initialize(TrainerSection())
    batch = random_batch(ROWS, SHORT, LAYERS.vocab)
    objective = SftObjective.of(batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_tiny_model(path, LAYERS)
        parts = get_args(Recompute)
        peaks = {f"{part}, peak (MB)": _in_own_process(path, TOKENS, part, CHUNK) / 1e6 for part in parts}
        trainers = {part: _trainer(path, layout, SHORT, recompute=part) for part in parts}
        sides = {part: lambda each=each: each.train_step(batch, objective) for part, each in trainers.items()}
        times = interleaved(sides, ROUNDS, warmup=2)
    parallel.shutdown()
    return Result(
        name="train step time, layers computed once more / none (hidden 512, 4 layers, 8,192 tokens)",
        value=median_ratio(times["layer"], times["none"]),
        bar=1.4,
        at_least=False,
        parts={f"{part} (s)": statistics.median(values) for part, values in times.items()}
        | {f"{part} / none": median_ratio(times[part], times["none"]) for part in ("attention", "experts")}
        | peaks,
    )


def _trainer(path: Path, layout: Layout, width: int, **keys: Any) -> Any:
    from fp8rl.trainer.trainer import Trainer

    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
    return Trainer(path, TrainerSection(**keys), numerics, layout, seed=0, total_steps=100, max_sequence_length=width)


if __name__ == "__main__":
    print(_one(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
