"""Has what several diagnoses share: the batch on which both sides are compared, a trainer of one rank in this process,
and the difference of two log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fp8rl.diagnose.report import Difference
from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.sampling import Truncation
from fp8rl.rl.mismatch.logprobs import logprob_metrics
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rl.run.feed.problems import to_prompts, training_problems
from fp8rl.rollout.types import Prompt
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.step.batch import Scored, TokenBatch

if TYPE_CHECKING:
    from fp8rl.rl.run.run import Run
    from fp8rl.trainer.distributed.layout import Layout
    from fp8rl.trainer.scorer import Scorer
    from fp8rl.trainer.trainer import Trainer

# The calibration batch: the experiment's own problems, and prompts long enough to strain.

PROBLEMS = 16
ANSWERS = 2
LONG_PROMPTS = 4
LONG_TOKENS = 320
"""Tokens of a long prompt: more than two key splits of attention, so that their order of summation is tested."""


def calibration_prompts(run: Run) -> list[Prompt]:
    """Return at most PROBLEMS of the run's first step, and LONG_PROMPTS that each join several problems."""
    experiment = run.experiment
    prompts = to_prompts(run.tokenizer, training_problems(experiment).of_step(1, PROBLEMS))
    room = experiment.rollout.context_length - experiment.rollout.max_new_tokens - 1
    tokens = min(LONG_TOKENS, room)
    long = []
    for index in range(LONG_PROMPTS):  # prompts in a row, over and over, cut at their beginning
        turned = prompts[index:] + prompts[:index]
        row = [token for prompt in turned for token in prompt.token_ids]
        long.append(Prompt(turned[-1].problem, (row * -(-tokens // len(row)))[-tokens:]))
    return prompts + long


def sampled_batch(run: Run, prompts: list[Prompt], temperature: float, cut: Truncation | None = None) -> TokenBatch:
    """Sample ANSWERS to each prompt; batch them as a step would, without advantages. cut: None: the spec's."""
    groups = to_groups(prompts, ANSWERS, run_seed=run.experiment.run.seed, step=0)
    cut, replay = cut or run.experiment.rollout.truncation, run.numerics.router_replay == "replay"
    supports = run.experiment.carries_supports and cut.cuts
    answers = run.sampling.sample(groups, temperature, **vars(cut), supports=supports)
    return batch_from_trajectories(answers, temperature, replay=replay, truncation=cut)


# One rank of the trainer in this process, for what is scored without a run. Megatron is imported here alone.


@contextmanager
def one_rank(config: TrainerSection, numerics: NumericsConfig) -> Iterator[Layout]:
    """Open the process groups of a one-rank trainer. numerics: may have the reduction order of a larger layout.
    Raises UserError: exact mode, on a machine where a token's result depends on its batch."""
    from fp8rl.trainer.distributed import parallel

    parallel.start(0, numerics)
    layout = parallel.initialize(config)
    try:
        from fp8rl.trainer.trainer import check_row_invariance  # Megatron is quiet from here on

        if numerics.mode == "exact":
            check_row_invariance(kv=numerics.kv_format)
        yield layout
    finally:
        parallel.shutdown()


@contextmanager
def one_trainer(
    path: Path, numerics: NumericsConfig, micro_batch_tokens: int, longest: int, adapter: AdapterSection | None = None
) -> Iterator[Trainer]:
    """Make a trainer of one rank from `path`, to score and export (see `one_rank`). longest: tokens of a row."""
    config = TrainerSection(micro_batch_tokens=micro_batch_tokens)
    with one_rank(config, numerics) as layout:
        from fp8rl.trainer.trainer import Trainer

        yield Trainer(TrainerSpec(path, config, numerics, 0, 1, longest, adapter=adapter), layout)


def score_recorded(model: Scorer, batch: TokenBatch) -> Scored:
    """Score recorded tokens with our ops on one rank; the rows stay in the order of the batch."""
    return Scored.assembled([model.score_routed(batch)], batch, batch.rows)


# How far two log-probabilities of the same tokens are apart, in the numbers that every diagnosis gives.


def difference(first: Tensor, second: Tensor, mask: Tensor) -> Difference:
    """Compare two tensors on the tokens of a bool mask; all three have the shape [B, S]."""
    values, abs_diff = logprob_metrics(first, second, mask), "mismatch/train_rollout_logprob_abs_diff"
    return Difference(
        tokens=int(values["mismatch/tokens"]),
        nonfinite=int(values["mismatch/nonfinite_count"]),
        exact_frac=values.get("mismatch/exact_frac"),
        k3_kl=values.get("mismatch/k3_kl"),
        **{name: values.get(f"{abs_diff}_{name}") for name in ("mean", "p50", "p99", "max")},
    )
