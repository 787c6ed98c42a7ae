"""One base for a frozen trainer and its engines: what both have in memory, against one copy; the same bits; the time.

What a process holds beside the base is what it has more of private memory than one that needs no base: the trainer more
than this process before it, an engine more than one that has done the same with copies of its own, less these, whose
size is known. All have handed back what they freed: what the C library keeps of that varies by hundreds of MB.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.core.memory import give_back
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.types import NO_WEIGHTS
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.bridge import give_base, send_and_verify
from fp8rl.weight_sync.frozen import place_base
from fp8rl.weight_sync.manifest import Manifest
from fp8rl.weight_sync.served import convert_checkpoint, would_send, write_served_checkpoint
from lab.bench.measure import Result, interleaved, median_ratio
from lab.bench.memory import watched
from lab.bench.trainers import EXACT
from tests.support.tiny_model import TinyModel, write_tiny_model

MODEL = TinyModel(layers=14, hidden=1024, heads=8, kv_heads=2, intermediate=1024, experts=16, top_k=2, vocab=2048)
ENGINES = 3
"""One with copies of its own, and two that read the base."""
ROWS, WIDTH, ROUNDS = 4, 128, 5
ANONYMOUS = "RssAnon"
"""Bytes of a process without files, which the kernel takes back as it likes, and without the base."""


def run() -> Iterator[Result]:
    enable_compiler()
    layout = parallel.initialize(TrainerSection())
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model", MODEL)
        yield from _measure(Path(folder), layout)
    parallel.shutdown()


@dataclass(frozen=True)
class Memory:
    """Bytes of one process and its children: private to it, and its share of what is mapped of a base."""

    private: int
    of_base: float

    @classmethod
    def of(cls, pid: int) -> Memory:
        give_back()
        here = psutil.Process(pid)
        tree = [here, *(here.children(recursive=True) if pid != psutil.Process().pid else [])]
        maps = [(m.path, m) for process in tree for m in process.memory_maps(grouped=False)]
        base = [m for path, m in maps if path.startswith("/memfd:base")]
        others = [m for path, m in maps if not path.startswith("/memfd:base")]
        return cls(sum(m.private_clean + m.private_dirty for m in others), sum(m.pss for m in base))


def _measure(folder: Path, layout: Any) -> list[Result]:
    from fp8rl.trainer.scorer import Scorer

    spec, numerics = EXACT.rollout_spec, EXACT
    convert_checkpoint(folder / "model", folder / "served", spec)
    write_served_checkpoint((), folder / "model", folder / "described", spec)
    tokens = torch.randint(6, MODEL.vocab, (ROWS, WIDTH - 4), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((ROWS,), tokens.shape[1])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    batch = TokenBatch(tokens, lengths, mask, 1.0)

    def scorer(shared_base: bool) -> Any:
        spec = TrainerSpec(folder / "model", TrainerSection(), numerics, 0, 1, WIDTH, shared_base=shared_base)
        made = Scorer(spec, layout)
        made.model.requires_grad_(False)
        return made

    scorer(False).score(batch)  # what is compiled, and all that a first model leaves
    gc.collect()
    here_before = Memory.of(psutil.Process().pid)
    give_back()
    with watched(ANONYMOUS) as peak:
        shared = scorer(True)
        place_base(shared, spec)
    here_score = shared.score(batch)[1]
    here_after = Memory.of(psutil.Process().pid)
    give_back()
    with watched(ANONYMOUS) as own_peak:
        own = scorer(False)
        logprobs = own.score(batch)[1].clone()
    ranks: Any = SimpleNamespace(apply=lambda function, *args: [function(shared, *args)])
    config = RolloutSection(max_total_tokens=4096, context_length=WIDTH + 64, prefix_cache=False)
    plugin, report = {"numerics": numerics.to_dict()}, expected_report(numerics)
    runner = asyncio.Runner()
    engines, endpoints = [], []
    for index in range(ENGINES):
        waits = {"shared_base": index > 0}
        engines.append(Engine(config, folder / f"engine{index}.log", plugin | waits, report))
        start = (folder / "described", NO_WEIGHTS) if index else (folder / "served", 0)
        endpoints.append(runner.run(engines[-1].start(*start)))

    def memory() -> list[Memory]:
        for engine in engines:
            for _ in range(ROUNDS):
                runner.run(engine.score(tokens.tolist()))
            runner.run(engine.memory())  # which hands back what was freed
        return [Memory.of(engine.pid) for engine in engines]

    try:
        engines_own = runner.run(engines[0].memory())[0].weights
        whole = would_send(own.weights.share(own.model), spec, own.definition)
        on_base = endpoints[1:]
        manifest, sync, problems = send_and_verify(lambda: give_base(ranks, spec, on_base, 600.0), spec, on_base, 0)
        assert not problems and manifest == Manifest.merged(0, spec, [whole]), problems
        together = memory()
        mapped = Memory.of(psutil.Process().pid).of_base + sum(each.of_base for each in together)
        there = torch.tensor(runner.run(engines[1].score(tokens.tolist())))
        different = int((here_score != logprobs).sum() + (here_score[:, 1:] != there).sum())
        sides = {
            "trainer": (lambda: shared.score(batch), lambda: own.score(batch)),
            "engine": tuple(
                lambda engine=engine: runner.run(engine.score(tokens.tolist())) for engine in (engines[1], engines[0])
            ),
        }
        times = {
            side: interleaved({"base": base, "own": apart}, ROUNDS, warmup=2) for side, (base, apart) in sides.items()
        }
    finally:
        for engine in engines:
            runner.run(engine.stop())
        runner.close()
    one = len(shared.placed.base.flat)
    grown = [each.most - each.first for each in (peak, own_peak)]
    without = together[0].private - engines_own
    left = [here_after.private - here_before.private, *(each.private - without for each in together[1:])]
    parts = {"one copy (MB)": one / 1e6, "mapped by all (MB)": mapped / 1e6, "mapping and proof (s)": sync.seconds}
    for name, rest in zip(("trainer", "engine 1", "engine 2"), left, strict=True):
        parts[f"{name}, private beside the base (MB)"] = rest / 1e6
    parts["copies of an engine's own (MB)"] = engines_own / 1e6
    return [
        Result(
            name="resident bytes of the base, a trainer and an engine / one copy (one more engine maps it too)",
            value=(mapped + sum(max(0, rest) for rest in left[:2])) / one,
            bar=1.05,
            at_least=False,
            parts=parts,
        ),
        Result(
            name="most private memory of a trainer as it starts on a base / with weights of its own",
            value=grown[0] / grown[1],
            bar=0.2,
            at_least=False,
            parts={"on a base (MB)": grown[0] / 1e6, "with its own, and operands (MB)": grown[1] / 1e6},
        ),
        Result(
            name="log-probabilities that differ: trainer with its own weights and on the base, and an engine on it",
            value=different,
            bar=0,
            at_least=False,
            parts={"compared": float(2 * tokens.numel())},
        ),
        *(
            Result(
                name=f"time of the {side} to score {ROWS * WIDTH} tokens, on the base / with copies of its own",
                value=median_ratio(taken["base"], taken["own"]),
                bar=1.5,
                at_least=False,
                parts={f"{name} (s)": statistics.median(each) for name, each in taken.items()},
            )
            for side, taken in times.items()
        ),
    ]
