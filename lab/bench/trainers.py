"""A trainer of one rank in this process: seconds of its step, in FP8 and BF16, packed and padded, with and without the
pass that scores a batch before its one update."""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import Mode, NumericsConfig, TrainerPrecision
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.step.batch import PassResult, TokenBatch
from fp8rl.trainer.step.microbatches import plan, plan_packed
from lab.bench.measure import DEMO, Result, interleaved, median_ratio
from tests.support.tiny_model import TinyModel, write_tiny_model

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

MODEL = TinyModel(layers=4, hidden=512, heads=4, kv_heads=2, intermediate=512, experts=8, top_k=2, vocab=1024)
ROWS, WIDTH, ROUNDS = 64, 128, 5
SHAPE = "hidden 512, 4 layers, 8,192 tokens"
LENGTHS = Path(__file__).with_name("demo_lengths.json")
"""Tokens of each row, prompt included, in some steps of `examples/arithmetic.yaml`."""


def numerics_of(precision: TrainerPrecision = "fp8", mode: Mode = "exact") -> NumericsConfig:
    return NumericsConfig(mode=mode, spec=QuantSpec.preset("fp8_block_pow2"), trainer=precision)


EXACT = numerics_of()


@contextmanager
def one_rank(model: TinyModel | Path = MODEL, compiled: bool = True) -> Iterator[Callable[..., Trainer]]:
    """Makes trainers of a model, a random one or one that is stored."""
    if compiled:
        enable_compiler()
    layout = parallel.initialize(TrainerSection())
    from fp8rl.trainer.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        path = model if isinstance(model, Path) else Path(folder) / "model"
        if isinstance(model, TinyModel):
            write_tiny_model(path, model)

        def trainer(width: int = WIDTH, numerics: NumericsConfig = EXACT, adapter: Any = None, **keys: Any) -> Trainer:
            return Trainer(TrainerSpec(path, TrainerSection(**keys), numerics, 0, 100, width, adapter=adapter), layout)

        yield trainer
    parallel.shutdown()


def random_batch(rows: int = ROWS, width: int = WIDTH, vocab: int = MODEL.vocab, seed: int = 0) -> TokenBatch:
    """`rows` full rows of `width` tokens, of which all but the first count."""
    tokens = torch.randint(6, vocab, (rows, width), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[:, 0] = False
    return TokenBatch(tokens, torch.full((rows,), width), mask)


def step_seconds(trainers: dict[str, Any], batch: TokenBatch) -> dict[str, list[float]]:
    """Seconds of a step of each trainer in every round."""
    objective = SftObjective.of(batch)
    return interleaved({n: partial(t.train_step, batch, objective) for n, t in trainers.items()}, ROUNDS, warmup=2)


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {f"{name} (s)": statistics.median(values) for name, values in times.items()}


def train() -> Iterator[Result]:
    """FP8 forward and backward against BF16 and against native FP8."""
    with one_rank() as trainer:
        sides = {"BF16 step": numerics_of("bf16"), "FP8 step": EXACT, "native step": numerics_of(mode="native")}
        made = {name: trainer(numerics=numerics) for name, numerics in sides.items()}
        times = step_seconds(made, random_batch())
    parts = medians(times)
    yield Result(
        name=f"train step time, FP8 / BF16 ({SHAPE})",
        value=median_ratio(times["FP8 step"], times["BF16 step"]),
        bar=1.3,
        at_least=False,
        parts={name: parts[name] for name in ("BF16 step (s)", "FP8 step (s)")},
    )
    yield Result(
        name=f"train tokens/s, exact FP8 / native FP8 ({SHAPE})",
        value=median_ratio(times["native step"], times["FP8 step"]),
        bar=0.8,
        at_least=True,
        parts={"exact step (s)": parts["FP8 step (s)"], "native step (s)": parts["native step (s)"]},
    )


def skipped() -> Iterator[Result]:
    """A step of GRPO with a pass that scores the batch before its one update, and without.

    The first update of a batch finds the policy that scored it, so the ratio is 1 and the training forward has the old
    log-probabilities; frameworks that keep the two apart compute them in a pass of its own.
    """
    yield _skipped("hidden 512, 4 layers, 8,192 tokens", MODEL, random_batch())
    yield _skipped("demo's model, 256 rows of 30 tokens", DEMO, random_batch(256, 30, 96))


def _skipped(name: str, model: TinyModel | Path, batch: TokenBatch) -> Result:
    algorithm = Grpo()
    with one_rank(model) as make:
        trainer = make(batch.width)

        def scored() -> Tensor:
            logprobs: Tensor = trainer.score(batch)[1]
            return logprobs

        signs = torch.where(torch.arange(batch.rows) % 2 == 0, 1.0, -1.0)
        batch = batch.with_fields(advantages=signs[:, None] * batch.loss_mask, rollout_logprobs=scored())

        def once() -> PassResult:
            return trainer.forward_backward(batch, algorithm.objective(batch)).result

        def recomputed() -> PassResult:
            whole = batch.with_fields(old_logprobs=scored())
            return trainer.forward_backward(whole, algorithm.objective(whole)).result

        def step(gradients: Callable[[], PassResult]) -> Callable[[], object]:
            return lambda: (gradients(), trainer.update())

        one, other = once(), recomputed()
        times = interleaved({"without": step(once), "with": step(recomputed)}, ROUNDS, clock=time.process_time)
    return Result(
        name=f"CPU time of a train step, old log-probabilities in a pass of their own / skipped ({name})",
        value=median_ratio(times["with"], times["without"]),
        bar=1.1,
        at_least=True,
        parts={
            "step with the pass (s)": statistics.median(times["with"]),
            "step without it (s)": statistics.median(times["without"]),
            "difference of loss": abs(one.loss - other.loss),
            "difference of gradient norm": abs(one.grad_norm - other.grad_norm),
        },
    )


def packing() -> Iterator[Result]:
    """The cost of padding in a step: rows padded to the longest of their micro-batch, or end to end."""
    rng = random.Random(0)
    drawn = [min(512, max(2, round(64 * math.exp(rng.gauss(0, 1))))) for _ in range(96)]
    yield _packed("lengths of the demo", json.loads(LENGTHS.read_text()), 1.05)
    yield _packed("log-normal lengths, 64 in the median", [drawn], 0.95)


def _packed(name: str, steps: list[list[int]], bar: float, budget: int = 4096) -> Result:
    """The step time of the last of these steps, and the padding of all."""
    lengths = torch.tensor(steps[-1])
    width = int(lengths.max())
    tokens = torch.randint(6, MODEL.vocab, (len(lengths), width), generator=torch.Generator().manual_seed(0))
    real = torch.arange(width) < lengths[:, None]
    real[:, 0] = False  # a first token is no target
    with one_rank() as trainer:
        made = {side: trainer(width, packing=side == "end to end") for side in ("end to end", "padded")}
        times = step_seconds(made, TokenBatch(tokens, lengths, real))
    padded = sum(len(rows) * max(step[row] for row in rows) for step in steps for rows in plan(step, 1, budget)[0])
    return Result(
        name=f"train step time, rows end to end / padded ({name}; hidden 512, 4 layers, {sum(steps[-1]):,} tokens)",
        value=median_ratio(times["end to end"], times["padded"]),
        bar=bar,
        at_least=False,
        parts={
            **medians(times),
            "padding of sorted rows (%)": 100 * (1 - sum(map(sum, steps)) / padded),
            "micro-batches, padded": sum(len(plan(step, 1, budget)[0]) for step in steps),
            "micro-batches, end to end": sum(len(plan_packed(step, 1, budget)[0]) for step in steps),
        },
    )
