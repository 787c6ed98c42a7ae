"""The real engine on two layers of Qwen3-30B-A3B: does it agree with the real trainer, and how fast does it sample?"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rl.models import Model, read_model
from fp8rl.models.checkpoint.reading import stored_tensors
from fp8rl.numerics.backend import implementation
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.types import NO_WEIGHTS, Endpoint, Problem, Prompt, SamplingParams, Trajectory
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed import parallel
from fp8rl.weight_sync.bridge import SendTask, SyncReport, send_and_verify, send_shard
from fp8rl.weight_sync.served import write_served_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch, written
from lab.bench.runs import exact_steps

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

SPEC = QuantSpec.preset("fp8_block_pow2")
UPDATES, ROUNDS = 2, 3
LONGEST_PROMPT = 64
BUCKET_BYTES = 256 << 20
SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=2", "eval.problems=8")
"""What makes the steps of a rehearsal short."""
COLUMNS = {
    "reward": "rollout/reward_mean",
    "largest |d|": "mismatch/train_rollout_logprob_abs_diff_max",
    "tokens": "mismatch/tokens",
}
TIMES = {"step (s)": "perf/step_seconds", "rollout (s)": "perf/rollout_seconds", "train (s)": "perf/train_seconds"}


def agreement(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Sample, compare, train, sync, and again: log-probabilities, redrawn tokens and digests, of every token."""
    from fp8rl.trainer.trainer import Trainer

    numerics = NumericsConfig(mode="exact", spec=SPEC)
    model = written(sizes.served, watch.device, done.scratch)
    parallel.start(0, numerics)
    config = TrainerSection(lr=1e-3, warmup_steps=0, micro_batch_tokens=4096, head_chunk_tokens=1024)
    layout = parallel.initialize(config)
    worst = 0.0
    tokens = redrawn = mismatched = 0
    # The engine first: it measures what memory is free when it starts.
    with _serving(model, numerics, sizes) as served:
        longest = LONGEST_PROMPT + sizes.new_tokens
        trainer = Trainer(TrainerSpec(model, config, numerics, 0, 100, longest), layout)
        for update in range(UPDATES + 1):
            report = served.sync(trainer, trainer.weight_version)
            answers = served.answer(sizes, update)
            batch = batch_from_trajectories(answers, 1.0, redraws=len(answers))
            passed = trainer.train_step(batch, SftObjective.of(batch))
            rows, mask = passed.rows, batch.loss_mask[passed.rows]
            d = (passed.result.logprobs - batch.fields["rollout_logprobs"][rows])[mask].abs()
            assert passed.result.draws is not None
            other = int((passed.result.draws != batch.tokens[rows])[mask].sum())
            what = {"updates": update, "tokens": len(d), "largest |d|": d.max().item(), "drawn otherwise": other,
                    "tensors": report.verified_tensors, "that differ": report.mismatched_tensors}  # fmt: skip
            done.row(what, {"sync (s)": report.seconds, "step (s)": passed.result.seconds})
            worst, tokens = max(worst, what["largest |d|"]), tokens + len(d)
            redrawn, mismatched = redrawn + other, mismatched + report.mismatched_tensors
    parallel.shutdown()
    done.equal(f"trainer against engine through {UPDATES} updates, largest |d|", worst, tokens=tokens)
    done.equal("sampled tokens that the trainer draws otherwise", redrawn, tokens=tokens)
    done.equal("synced tensors that differ in the engine", mismatched)


def rates(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Sampled tokens per second, one engine after the other: their memory and graphs are not to be shared."""
    sides = {
        "FP8 exact": NumericsConfig(mode="exact", spec=SPEC),
        "BF16 exact": NumericsConfig(mode="exact", spec=SPEC, trainer="bf16", rollout="bf16"),
        "FP8 native": NumericsConfig(mode="native", spec=SPEC),
        "BF16": NumericsConfig(mode="native", spec=SPEC, trainer="bf16", rollout="bf16"),
    }
    path = written(sizes.served, watch.device, done.scratch)

    def rate(name: str, numerics: NumericsConfig) -> float:
        implementation.choose(watch.device, numerics.spec)
        with _serving(path, numerics, sizes) as served:
            served.sync(_Stored(path, read_model(path), watch.device), 0)
            measured = []
            for index in range(ROUNDS + 1):
                start = time.perf_counter()
                count = sum(len(answer.token_ids) for answer in served.answer(sizes, index))
                measured.append(count / (time.perf_counter() - start))
        median = statistics.median(measured[1:])  # the first compiles
        done.row({"engine": name, "answers": sizes.prompts * sizes.answers, "tokens of each": sizes.new_tokens},
                 {"tokens/s": median, "slowest": min(measured[1:]), "fastest": max(measured[1:])})  # fmt: skip
        return median

    bars = (("FP8 exact", "BF16 exact", 1.0), ("FP8 exact", "BF16", 0.6), ("FP8 exact", "FP8 native", 0.8))
    done.ratios("rollout", "tokens/s", done.each_side(sides, rate), bars)


def demo(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """`fp8rl demo` with few steps, as a user starts it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from fp8rl.cli import main; main()", "demo"]
        settings = [f"run.dir={folder}", f"run.steps={sizes.demo}", "tracking.wandb.mode=disabled"]
        settings += SMALL if watch.device.type == "cpu" else ()
        told = subprocess.run([*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(told.stdout, file=sys.stderr)
        after_steps = told.stdout.rpartition("\nstep ")[2].splitlines()[1:]  # what steps say stands in the metrics
        for line in after_steps[-12:]:
            if line.strip() and folder not in line:
                done.row({"it said": line.strip()})
        if told.returncode:
            raise RuntimeError(f"fp8rl demo: found exit code {told.returncode}, expected 0")
        rows = read_metrics(Path(folder) / "demo" / "metrics.jsonl")
    for row in rows:
        what = {"step": row["step"], **{name: row[key] for name, key in COLUMNS.items() if key in row}}
        done.row(what, {name: row[key] for name, key in TIMES.items() if key in row})
    done.result(exact_steps(f"the demo, {sizes.demo} steps", rows), of_times=False)


@dataclass(frozen=True)
class _Stored:
    """A trainer's place in a sync, for weights as they are stored."""

    path: Path
    definition: Model
    device: torch.device

    model = None

    @property
    def weights(self) -> _Stored:
        return self

    def share(self, model: None, stacked: bool) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stored_tensors(self.path, self.definition):
            yield name, tensor.to(self.device, self.definition.tensors[name].served)


@dataclass(frozen=True)
class _Served:
    runner: asyncio.Runner
    engine: Engine
    endpoint: Endpoint
    spec: QuantSpec

    def sync(self, weights: Trainer | _Stored, version: int) -> SyncReport:
        """Every tensor, quantized and verified."""
        task = SendTask(TensorTransport(BUCKET_BYTES), self.spec, [self.endpoint], version)
        sent: Any = weights
        _, report, problems = send_and_verify(lambda: [send_shard(sent, task)], self.spec, [self.endpoint], version)
        if problems:
            raise RuntimeError("sync: found tensors that differ, expected none: " + "; ".join(problems[:3]))
        return report

    def answer(self, sizes: Sizes, step: int) -> list[Trajectory]:
        """Answers to prompts of random tokens and lengths, new ones in each step."""
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(1, LONGEST_PROMPT + 1, (sizes.prompts,), generator=generator).tolist()
        # From 6 on: special tokens, which would end answers, come before.
        prompts = [
            Prompt(Problem("", ""), torch.randint(6, sizes.served.vocab, (length,), generator=generator).tolist())
            for length in lengths
        ]
        groups = to_groups(prompts, sizes.answers, run_seed=0, step=step)
        answers: list[Trajectory] = self.runner.run(self.engine.generate(groups, SamplingParams(sizes.new_tokens)))
        return answers


@contextmanager
def _serving(model: Path, numerics: NumericsConfig, sizes: Sizes) -> Iterator[_Served]:
    """An engine as a run starts it, which waits for its first sync."""
    longest = LONGEST_PROMPT + sizes.new_tokens + 8
    config = RolloutSection(context_length=longest, max_total_tokens=max(4096, sizes.prompts * sizes.answers * longest))
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        described = Path(folder) / "model"
        write_served_checkpoint((), model, described, numerics.rollout_spec)
        plugin = {"numerics": numerics.to_dict()}
        engine = Engine(config, Path(folder) / "engine.log", plugin, expected_report(numerics))
        endpoint = runner.run(engine.start(described, NO_WEIGHTS))
        try:
            yield _Served(runner, engine, endpoint, numerics.rollout_spec)
        finally:
            runner.run(engine.stop())
