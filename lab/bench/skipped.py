"""What it is worth not to score a batch before its one update: a step of GRPO with that pass, and without.

The first update of a batch finds the policy that scored it, so the ratio is 1 and the training forward has the old
log-probabilities; frameworks that keep the two apart compute them in a pass of its own.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fp8rl.models.tiny import write_tiny_model
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.objective import PassResult
from lab.bench import train
from lab.bench.batch import random_batch
from lab.bench.measure import Result, interleaved, median_ratio

ROUNDS = 5
DEMO = Path("examples/models/tiny_qwen3_moe")


def run() -> list[Result]:
    enable_compiler()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_tiny_model(path, train.MODEL)
        return [
            _measured("hidden 512, 4 layers, 8,192 tokens", path, random_batch(train.ROWS, train.WIDTH, 1024)),
            _measured("demo's model, 256 rows of 30 tokens", DEMO, random_batch(256, 30, 96)),
        ]


def _measured(name: str, path: Path, batch: TokenBatch) -> Result:
    config = TrainerSection(micro_batch_tokens=4096)
    layout = parallel.initialize(config)
    from fp8rl.trainer.trainer import Trainer

    numerics = NumericsConfig(mode="exact", spec=QuantSpec.preset("fp8_block_pow2"), trainer="fp8")
    trainer = Trainer(
        path, config, numerics, layout, seed=0, total_steps=100, max_sequence_length=batch.tokens.shape[1]
    )

    def scored() -> Tensor:
        return trainer.score(batch)[1]

    signs = torch.where(torch.arange(batch.rows) % 2 == 0, 1.0, -1.0)
    batch = batch.with_fields(advantages=signs[:, None] * batch.loss_mask, rollout_logprobs=scored())
    algorithm = Grpo()

    def skipped() -> PassResult:
        return trainer.forward_backward(batch, algorithm.objective(batch)).result

    def recomputed() -> PassResult:
        whole = batch.with_fields(old_logprobs=scored())
        return trainer.forward_backward(whole, algorithm.objective(whole)).result

    def step(gradients: Callable[[], PassResult]) -> Callable[[], object]:
        return lambda: (gradients(), trainer.update())

    one, other = skipped(), recomputed()
    times = interleaved({"skipped": step(skipped), "recomputed": step(recomputed)}, ROUNDS, clock=time.process_time)
    parallel.shutdown()
    return Result(
        name=f"CPU time of a train step, old log-probabilities in a pass of their own / skipped ({name})",
        value=median_ratio(times["recomputed"], times["skipped"]),
        bar=1.1,
        at_least=True,
        parts={
            "step with the pass (s)": statistics.median(times["recomputed"]),
            "step without it (s)": statistics.median(times["skipped"]),
            "difference of loss": abs(one.loss - other.loss),
            "difference of gradient norm": abs(one.grad_norm - other.grad_norm),
        },
    )
