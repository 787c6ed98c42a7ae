"""How many of the served bytes a step changes, by learning rate, and what is left to send of a full sync.

Adam moves each weight by about the learning rate, so the churn grows with it, and falls with the size of the weights.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.models.tiny import TinyModel, write_tiny_model
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.weight_sync.buckets import changes
from fp8rl.weight_sync.served import served_tensors
from lab.bench.batch import random_batch
from lab.bench.measure import Result

MODEL = TinyModel(layers=4, hidden=512, heads=4, kv_heads=2, intermediate=512, experts=8, top_k=2, vocab=1024)
RATES = (1e-6, 1e-5, 1e-4)
ROWS, WIDTH, STEPS = 32, 64, 4


def run() -> Iterator[Result]:
    enable_compiler()
    layout = parallel.initialize(TrainerSection())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_tiny_model(path, MODEL)
        for rate in RATES:
            yield _measure(path, rate, layout)
    parallel.shutdown()


def _measure(path: Path, rate: float, layout: Layout) -> Result:
    from fp8rl.trainer.trainer import Trainer

    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
    config = TrainerSection(lr=rate, warmup_steps=0, micro_batch_tokens=4096)
    trainer = Trainer(path, config, numerics, layout, seed=0, total_steps=100, max_sequence_length=WIDTH)
    table = trainer.definition.tensors
    shares: list[float] = []
    changed: dict[str, list[float]] = {"codes": [], "scales": [], "BF16 values": []}
    former: dict[str, Tensor] = {}
    for step in range(STEPS + 1):
        batch = random_batch(ROWS, WIDTH, MODEL.vocab, seed=step)
        trainer.train_step(batch, SftObjective.of(batch))
        served = {
            name: tensor.clone()
            for name, tensor in served_tensors(trainer.export_weights(), numerics.rollout_spec, trainer.definition)
        }
        deltas = changes(trainer.last_sent, served.items(), step, step - 1, table, ranks=1)
        sent = sum(tensor.nbytes for _, tensor in deltas)
        if step:
            shares.append(sent / sum(tensor.nbytes for tensor in served.values()))
            for kind, fraction in _fractions(served, former).items():
                changed[kind].append(fraction)
        former = served
    return Result(
        name=f"delta bytes / full FP8 bytes at lr {rate:g}",
        value=statistics.median(shares),
        bar=0.2 if rate == RATES[0] else 1.0,
        at_least=False,
        parts={f"changed {kind}": statistics.median(values) for kind, values in changed.items()},
    )


def _fractions(new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, float]:
    """The fraction of each kind's elements that differ."""
    differing: dict[str, int] = {}
    total: dict[str, int] = {}
    for name, tensor in new.items():
        scales, codes = name.endswith(SCALE_SUFFIX), tensor.dtype.itemsize == 1
        kind = "scales" if scales else "codes" if codes else "BF16 values"
        differing[kind] = differing.get(kind, 0) + int((tensor.float() != old[name].float()).sum())
        total[kind] = total.get(kind, 0) + tensor.numel()
    return {kind: differing[kind] / total[kind] for kind in total}
