"""Memory of a pass whose logits are made in chunks, and the time of layers that are computed once more."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import Recompute
from lab.bench.measure import Result, median_ratio
from lab.bench.trainers import MODEL, SHAPE, medians, one_rank, random_batch, step_seconds
from tests.support.tiny_model import TinyModel

WORDS = TinyModel(layers=1, hidden=256, heads=2, kv_heads=2, intermediate=256, experts=0, top_k=0, vocab=151_936)
TOKENS, WIDTH, CHUNK = 8192, 512, 1024
PLAIN_TOKENS = (1024, 2048)
"""Passes without chunks that are measured: one of 8,192 tokens takes more memory than a machine may have."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Without these the C library keeps what is freed."""


def run() -> Iterator[Result]:
    few, more = (_peak("words", tokens, "none", TOKENS) for tokens in PLAIN_TOKENS)
    chunked = _peak("words", TOKENS, "none", CHUNK)
    # Without chunks the peak grows by the same bytes for each token.
    plain = more + (more - few) * (TOKENS - PLAIN_TOKENS[1]) / (PLAIN_TOKENS[1] - PLAIN_TOKENS[0])
    yield Result(
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
    parts = get_args(Recompute)
    peaks = {f"{part}, peak (MB)": _peak("layers", TOKENS, part, CHUNK) / 1e6 for part in parts}
    with one_rank() as trainer:
        times = step_seconds({part: trainer(recompute=part) for part in parts}, random_batch())
    yield Result(
        name=f"train step time, layers computed once more / none ({SHAPE})",
        value=median_ratio(times["layer"], times["none"]),
        bar=1.4,
        at_least=False,
        parts=medians(times)
        | {f"{part} / none": median_ratio(times[part], times["none"]) for part in ("attention", "experts")}
        | peaks,
    )


def _peak(model: str, tokens: int, recompute: str, chunk: int) -> float:
    """Bytes that a pass adds to a process of its own at its peak."""
    command = [sys.executable, "-m", "lab.bench.memory", model, str(tokens), recompute, str(chunk)]
    done = subprocess.run(command, env=os.environ | GIVES_BACK, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def _one(model: TinyModel, tokens: int, recompute: str, chunk: int) -> float:
    with one_rank(model, compiled=False) as make:
        trainer = make(WIDTH, micro_batch_tokens=tokens, recompute=recompute, head_chunk_tokens=chunk)
        for rows in (1, tokens // WIDTH):  # the first makes what is made once and for all
            batch = random_batch(rows, WIDTH, trainer.definition.sizes.vocab_size)
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            before = restart_peak()
            trainer.forward_backward(batch, SftObjective.of(batch))
            peak = status("VmHWM") - before
    return peak


def restart_peak() -> int:
    """The bytes that this process has in memory, from which its peak is counted again."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(key: str) -> int:
    """Bytes of this process, by their name in its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


class Peak:
    """Bytes of a kind that the process had at first, and at most since then."""

    def __init__(self, first: int) -> None:
        self.first = self.most = first


@contextmanager
def watched(key: str) -> Iterator[Peak]:
    """The peak within the block of what `status` says, as a thread sees it every 2 ms."""
    peak, done = Peak(status(key)), threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak.most = max(peak.most, status(key))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    print(_one(WORDS if sys.argv[1] == "words" else MODEL, int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
