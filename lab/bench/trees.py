"""Rows that share prefixes, laid as a tree and laid end to end: time and peak memory of a pass."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.trees import TreeMicroBatch
from lab.bench.measure import Result, interleaved, median_ratio
from lab.bench.memory import GIVES_BACK, restart_peak, status
from lab.bench.trainers import MODEL, medians, one_rank

ROUNDS = 3
SIDES: dict[str, dict[str, Any]] = {"rows end to end": {"packing": True}, "tree": {"prefix_sharing": True}}


@dataclass(frozen=True)
class Case:
    """Rows that share prefixes, and the bar of a pass."""

    groups: int
    shared: int
    """Tokens that a group's rows share."""
    stretch: int
    """Tokens of each branch."""
    branches: tuple[int, ...]
    """At each depth behind the shared tokens."""
    bar: float


LONG_PROMPT = "a group of 8, prompt of 512, answers of 64"
CASES = {
    "16 groups of 8, prompts of 10, answers of 12 (the demo's)": Case(16, 10, 12, (8,), 0.75),
    LONG_PROMPT: Case(1, 512, 64, (8,), 0.3),
    "an agent, 800 tokens, three turns of 60 that branch in two": Case(1, 800, 60, (1, 2, 2, 2), 0.25),
    "64 rows of 128 without anything in common": Case(64, 128, 0, (), 1.03),
}


def batch_of(case: Case) -> TokenBatch:
    """Rows of random tokens; those that are not shared are targets."""
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = []

    def grow(row: list[int], left: tuple[int, ...]) -> None:
        if not left:
            rows.append(row)
        for _ in range(left[0] if left else 0):
            more = torch.randint(6, MODEL.vocab, (case.stretch,), generator=generator).tolist()
            grow(row + more, left[1:])

    for _ in range(case.groups):
        grow(torch.randint(6, MODEL.vocab, (case.shared,), generator=generator).tolist(), case.branches)
    tokens = torch.tensor(rows)
    mask = torch.arange(tokens.shape[1]).expand(tokens.shape) >= (case.shared if case.branches else 1)
    return TokenBatch(tokens, torch.full((len(rows),), tokens.shape[1]), mask)


def run() -> Iterator[Result]:
    """A pass forward and backward; and a pass's peak where that has a bar."""
    for name, case in CASES.items():
        batch = batch_of(case)
        objective = SftObjective.of(batch)
        laid = TreeMicroBatch.of(batch, list(range(batch.rows)), 1).real
        with one_rank() as make:
            made = {side: make(batch.width, micro_batch_tokens=1 << 16, **keys) for side, keys in SIDES.items()}
            done = [trainer.forward_backward(batch, objective) for trainer in made.values()]
            logprobs = [each.result.logprobs[torch.tensor(each.rows).argsort()] for each in done]
            passes = {side: partial(trainer.forward_backward, batch, objective) for side, trainer in made.items()}
            times = interleaved(passes, ROUNDS, clock=time.process_time)
        yield Result(
            name=f"CPU time of a pass, tree / rows end to end ({name}; hidden 512, 4 layers)",
            value=median_ratio(times["tree"], times["rows end to end"]),
            bar=case.bar,
            at_least=False,
            parts={
                **medians(times),
                "tokens of rows": int(batch.lengths.sum()),
                "tokens of the tree": laid,
                "log-probabilities that differ": int((logprobs[0] != logprobs[1]).sum()),
            },
        )
    peaks = {side: _peak(side) for side in SIDES}
    yield Result(
        name=f"peak memory of a pass, tree / rows end to end ({LONG_PROMPT}; hidden 512, 4 layers)",
        value=peaks["tree"] / peaks["rows end to end"],
        bar=0.5,
        at_least=False,
        parts={f"{side} (MB)": peak / 1e6 for side, peak in peaks.items()},
    )


def _peak(side: str) -> float:
    """Bytes that a pass adds to a process of its own at its peak."""
    command = [sys.executable, "-m", "lab.bench.trees", side]
    done = subprocess.run(command, env=os.environ | GIVES_BACK, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def _one(side: str) -> float:
    with one_rank(compiled=False) as make:
        batch = batch_of(CASES[LONG_PROMPT])
        trainer = make(batch.width, micro_batch_tokens=1 << 16, **SIDES[side])
        for each in (batch.select([0]), batch):  # the first makes what is made once and for all
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            before = restart_peak()
            trainer.forward_backward(each, SftObjective.of(each))
            peak = status("VmHWM") - before
    return peak


if __name__ == "__main__":
    print(_one(sys.argv[1]))
