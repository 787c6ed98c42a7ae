"""One base for a frozen trainer and its engines: what both have in memory, against one copy; the same bits; the time.

What a process holds beside the base is counted by what it gives back: own copies, of known size, are replaced by the
mapping, and what they leave behind in private memory counts as held.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from bench.measure import Result, interleaved, median_ratio
from models.tiny import TinyModel, write_tiny_model
from numerics.backend.compiler import enable_compiler
from numerics.config import NumericsConfig
from numerics.holdings import give_back, tensors_in
from numerics.spec import QuantSpec
from rl.run.engines.serving import expected_report
from rollout.config import RolloutConfig
from rollout.engine import Engine
from rollout.server.client import EngineClient
from rollout.types import Endpoint
from trainer.config import TrainerConfig
from trainer.distributed import parallel
from trainer.step.batch import TokenBatch
from weight_sync.base import give_base
from weight_sync.bridge import send_and_verify
from weight_sync.hf_checkpoint import convert_checkpoint
from weight_sync.manifest import Manifest, Sent
from weight_sync.quantized import would_send

MODEL = TinyModel(layers=14, hidden=1024, heads=8, kv_heads=2, intermediate=1024, experts=16, top_k=2, vocab=2048)
ENGINES = 2
ROWS, WIDTH, ROUNDS = 4, 128, 5


def run() -> list[Result]:
    enable_compiler()
    layout = parallel.initialize(TrainerConfig())
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model", MODEL)
        found = _measure(Path(folder), layout)
    parallel.shutdown()
    return found


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
        return cls(
            sum(m.private_clean + m.private_dirty for path, m in maps if not _is_base(path)),
            sum(m.pss for path, m in maps if _is_base(path)),
        )


def _is_base(path: str) -> bool:
    return path.startswith("/memfd:base")


def _measure(folder: Path, layout: Any) -> list[Result]:
    from trainer.scorer import Scorer

    spec = QuantSpec.preset("fp8_block_pow2")
    numerics = NumericsConfig(spec=spec)
    convert_checkpoint(folder / "model", folder / "served", spec)
    scorer = Scorer(folder / "model", TrainerConfig(), numerics, layout, max_sequence_length=WIDTH)
    scorer.model.requires_grad_(False)
    ranks = SimpleNamespace(apply=lambda function, *args: [function(scorer, *args)])
    tokens = torch.randint(6, MODEL.vocab, (ROWS, WIDTH - 4), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((ROWS,), tokens.shape[1])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    batch = TokenBatch(tokens, lengths, mask, 1.0)
    config = RolloutConfig(max_total_tokens=4096, context_length=WIDTH + 64, prefix_cache=False)
    plugin, report = {"numerics": numerics.to_dict()}, expected_report(numerics)
    engines = [Engine(config, folder / f"engine{index}.log", plugin, report) for index in range(ENGINES)]
    runner = asyncio.Runner()
    endpoints = [runner.run(engine.start(folder / "served")) for engine in engines]

    def seconds() -> tuple[list[float], list[float]]:
        sides = {
            "trainer": lambda: scorer.score(batch),
            "engine": lambda: runner.run(engines[0].score(tokens.tolist())),
        }
        times = interleaved(sides, ROUNDS, warmup=2)
        return times["trainer"], times["engine"]

    def memory() -> list[Memory]:
        for engine in engines:
            runner.run(engine.score(tokens.tolist()))
        pids = [runner.run(engine.health()).pid for engine in engines]
        return [Memory.of(pid) for pid in (psutil.Process().pid, *filter(None, pids))]

    try:
        before_s = seconds()
        own = [_bytes_of_trainer(scorer), *(runner.run(_bytes_of_engine(each)) for each in endpoints)]
        apart = memory()
        logprobs = scorer.score(batch)[1].clone()
        whole = would_send(scorer.weights.share(scorer.model), spec, scorer.definition)
        manifest, sync, problems = send_and_verify(lambda: _given(ranks, spec, endpoints), spec, endpoints, 0)
        assert not problems and manifest == Manifest.merged(0, spec, [whole]), problems
        after_s = seconds()
        together = memory()
        there = torch.tensor(runner.run(engines[1].score(tokens.tolist())))
        here = scorer.score(batch)[1]
        different = int((here != logprobs).sum() + (here[:, 1:] != there).sum())
    finally:
        for engine in engines:
            runner.run(engine.stop())
        runner.close()
    one = len(scorer.placed.base.flat)
    left = [o - (a.private - t.private) for o, a, t in zip(own, apart, together, strict=True)]
    names = ("trainer", *(f"engine {index}" for index in range(ENGINES)))
    mapped = sum(each.of_base for each in together)
    parts = {"one copy (MB)": one / 1e6, "mapped by all (MB)": mapped / 1e6, "mapping and proof (s)": sync.seconds}
    for name, o, a, t, rest in zip(names, own, apart, together, left, strict=True):
        parts |= {
            f"{name}, its own copies before (MB)": o / 1e6,
            f"{name}, private before (MB)": a.private / 1e6,
            f"{name}, private with the base (MB)": t.private / 1e6,
            f"{name}, left behind (MB)": rest / 1e6,
        }
    return [
        Result(
            name="resident bytes of the base, a trainer and an engine / one copy (one more engine maps it too)",
            value=(mapped + sum(max(0, rest) for rest in left[:2])) / one,
            bar=1.05,
            at_least=False,
            parts=parts,
        ),
        Result(
            name="log-probabilities that differ: trainer before and on the base, and an engine on it",
            value=different,
            bar=0,
            at_least=False,
            parts={"compared": float(2 * tokens.numel())},
        ),
        *(
            Result(
                name=f"time of the {side} to score {ROWS * WIDTH} tokens, on the base / with copies of its own",
                value=median_ratio(after, before),
                bar=limit,
                at_least=False,
                parts={"on the base (s)": statistics.median(after), "own (s)": statistics.median(before)},
            )
            for side, before, after, limit in zip(("trainer", "engine"), before_s, after_s, (1.5, 1.5), strict=True)
        ),
    ]


def _given(ranks: Any, spec: QuantSpec, endpoints: list[Endpoint]) -> list[Sent]:
    return give_base(ranks, spec, endpoints, 600.0)


def _bytes_of_trainer(scorer: Any) -> int:
    operands = (each for _, operand in scorer.cache.operands() for each in tensors_in(operand))
    return _distinct([*scorer.model.parameters(), *operands])


def _distinct(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


async def _bytes_of_engine(endpoint: Endpoint) -> int:
    async with EngineClient(endpoint) as engine:
        return (await engine.memory())[0].weights
