"""The instruments of studies: one live trainer, chains of sums to teach it, and answers that it samples by itself.

In exact mode the engine's log-probabilities are the trainer's, and its tokens are a function of seeds and logits; so a
trainer that draws its own tokens samples what an engine would, and no engine is needed; `precision_cases` and
`gradient_direction` compare that with a live one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp8rl.numerics.config import NumericsConfig, TrainerPrecision
from fp8rl.numerics.sampling import answer_seed
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rollout.tasks.data import Source, load_problems
from fp8rl.rollout.tasks.rewards.builtin import integer
from fp8rl.rollout.types import Problem, prompt_ids
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.step.batch import TokenBatch
from lab.studies.harness.subjects import EXAMPLES, MODEL, TRAIN

if TYPE_CHECKING:
    from torch.distributed import Store
    from transformers import PreTrainedTokenizerBase

    from fp8rl.rl.run.run import Run
    from fp8rl.trainer.distributed.layout import Layout
    from fp8rl.trainer.scorer import Scorer
    from fp8rl.trainer.trainer import Trainer

EOS, MAX_NEW_TOKENS = 2, 20
LONGEST = 64
ROWS_AT_ONCE = 32
"""Rows of a forward without gradients."""
ONE_RANK = TrainerSection()


def exact(spec: QuantSpec | str = "fp8_block_pow2", precision: TrainerPrecision = "fp8") -> NumericsConfig:
    """Numerics of a trainer without an engine, of which nothing is asked that this spec would not allow."""
    chosen = QuantSpec.preset(spec) if isinstance(spec, str) else spec
    return NumericsConfig(spec=chosen, trainer=precision, rollout="bf16")


@contextmanager
def world(config: TrainerSection = ONE_RANK, rank: int = 0, store: Store | None = None) -> Iterator[Layout]:
    """One rank in this process, as a trainer's actor starts it; of several, which meet in the store."""
    from fp8rl.numerics.backend.compiler import enable_compiler
    from fp8rl.trainer.distributed import parallel

    enable_compiler()
    layout = parallel.initialize(config, rank, store)
    try:
        yield layout
    finally:
        parallel.shutdown()
        gc.collect()  # a trainer is full of cycles, and the threads of its process groups end with it


def trainer_of(
    model: Path,
    numerics: NumericsConfig,
    layout: Layout,
    *,
    config: TrainerSection = ONE_RANK,
    steps: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    length: int = LONGEST,
) -> Trainer:
    """A live trainer with the weights of a Hugging Face directory, for rows of up to `length` tokens."""
    from fp8rl.trainer.trainer import Trainer

    return Trainer(TrainerSpec(model, config, numerics, 0, steps, length, dtype=dtype), layout)


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """That of all models that are studied."""
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL)
    return loaded


class Chain(NamedTuple):
    """A question and its right answer, as token ids."""

    prompt_ids: list[int]
    target_ids: list[int]


@cache
def chains(path: Path) -> tuple[Chain, ...]:
    """Questions and right answers of a data file, as token ids."""
    return tuple(
        Chain(prompt_ids(tokenizer(), p), [*tokenizer().encode(p.answer, add_special_tokens=False), EOS])
        for p in load_problems(Source(path))
    )


def chosen_chains(path: Path, seed: int, count: int) -> list[Chain]:
    """`count` chains of a file, chosen by a seed."""
    known = chains(path)
    return [known[index] for index in _chosen(len(known), seed, count)]


def _chosen(known: int, seed: int, count: int) -> list[int]:
    return torch.randperm(known, generator=torch.Generator().manual_seed(seed))[:count].tolist()


def chain_batch(path: Path, seed: int, count: int) -> TokenBatch:
    """`count` chains of a file, chosen by a seed, to learn from."""
    prompts, answers = zip(*chosen_chains(path, seed, count))
    return TokenBatch.of(prompts, answers)


@dataclass(frozen=True)
class Sample:
    """Answers to some questions, those of one question in a row."""

    batch: TokenBatch
    """Its field `rollout_logprobs` is the sampler's log-probability of each token."""
    outcomes: Outcomes
    """Reward 1 for a right answer."""


def sampled(trainer: Trainer, seed: int, prompts: int, answers: int, temperature: float = 1.0) -> Sample:
    """`answers` to each of `prompts` questions that the trainer samples.

    Each token is drawn as the engine draws it, from the logits of a forward over the whole prefix.
    """
    asked = chosen_chains(TRAIN, seed, prompts)
    rows = [list(question.prompt_ids) for question in asked for _ in range(answers)]
    starts = [len(row) for row in rows]
    seeds = torch.tensor(
        [answer_seed(seed, 0, prompt, answer) for prompt in range(prompts) for answer in range(answers)]
    )
    open_rows = list(range(len(rows)))
    for _ in range(MAX_NEW_TOKENS):
        batch = _padded([rows[index] + [EOS] for index in open_rows], temperature, seeds[open_rows])
        order, done = trainer.score_routed(batch)
        assert done.draws is not None
        for at, row in enumerate(order):
            index = open_rows[row]
            rows[index].append(int(done.draws[at, len(rows[index])]))
        open_rows = [index for index in open_rows if rows[index][-1] != EOS]
        if not open_rows:
            break
    begun = list(zip(rows, starts, strict=True))
    batch = TokenBatch.of([row[:start] for row, start in begun], [row[start:] for row, start in begun])
    scored = torch.where(batch.loss_mask, logprobs(trainer, batch), 0.0)
    return Sample(batch.with_fields(rollout_logprobs=scored), _outcomes(asked, batch, answers))


def _outcomes(asked: Sequence[Chain], batch: TokenBatch, answers: int) -> Outcomes:
    decode, rewards, finished = tokenizer().decode, [], []
    for row, mask in enumerate(batch.loss_mask):
        answer, reference = batch.tokens[row, mask].tolist(), asked[row // answers].target_ids
        ended = answer[-1] == EOS
        rewards.append(integer(decode(answer[:-1] if ended else answer), decode(reference[:-1]), ended))
        finished.append(ended)
    groups = torch.arange(len(asked)).repeat_interleave(answers)
    return Outcomes(torch.tensor(rewards), groups, torch.tensor(finished))


@contextmanager
def beside_engine(model: Path, mode: str = "exact", settings: Sequence[str] = ()) -> Iterator[Run]:
    """An FP8 trainer and a live FP8 engine, synced; without routing replay and gates.

    settings: further keys of the demo's spec, as the command takes them.
    """
    from fp8rl.rl.experiment import load_experiment
    from fp8rl.rl.run.run import open_pair

    file = "arithmetic.yaml" if mode == "exact" else "arithmetic_native.yaml"
    own = [f"model.path={model.absolute()}", "numerics.router_replay=off", "gates=[]"]
    with open_pair(load_experiment(EXAMPLES / file, [*own, *settings]), say=lambda text: None) as stack:
        stack.syncing.sync()
        yield stack


def sampled_by_engine(stack: Run, seed: int, prompts: int, answers: int, temperature: float = 1.0) -> Sample:
    """Ask the engine what `sampled` asks: the same questions and seeds, so in exact mode the same tokens."""
    known = load_problems(Source(TRAIN))
    asked = [known[index] for index in _chosen(len(known), seed, prompts)]
    batch = answered(stack, asked, seed, answers, temperature)
    return Sample(batch, _outcomes(chosen_chains(TRAIN, seed, prompts), batch, answers))


def answered(stack: Run, problems: Sequence[Problem], seed: int, answers: int, temperature: float = 1.0) -> TokenBatch:
    """Ask the engine for `answers` to each problem; rows and field `rollout_logprobs` as a `Sample` has them."""
    from fp8rl.rl.run.feed.feed import to_groups
    from fp8rl.rl.run.feed.problems import to_prompts

    groups = to_groups(to_prompts(stack.tokenizer, problems), answers, run_seed=seed, step=0)
    return batch_from_trajectories(stack.sampling.sample(groups, temperature), temperature)


def log_policy(trainer: Scorer, batch: TokenBatch) -> Tensor:
    """fp32 [B, S - 1, V]: the log-probability of every token of the vocabulary at the places of tokens 1 to S - 1."""
    parts = []
    with torch.no_grad():
        for tokens in batch.tokens.split(ROWS_AT_ONCE):
            logits = trainer.model(tokens, position_ids=None, attention_mask=None)
            parts.append((logits[:, :-1].float() / batch.temperature).log_softmax(-1))
    return torch.cat(parts)


def logprobs(trainer: Scorer, batch: TokenBatch) -> Tensor:
    """fp32 [B, S], of the batch's tokens, in the order of its rows."""
    rows, scored = trainer.score(batch)
    return scored[torch.tensor(rows).argsort()]


def nll(trainer: Trainer, batch: TokenBatch) -> float:
    """Mean negative log-likelihood of the target tokens, nats."""
    return -float(logprobs(trainer, batch)[batch.loss_mask].double().mean())


def by_sequence(values: Tensor, batch: TokenBatch) -> list[float]:
    """The mean of [B, S] over the target tokens of each row."""
    masked = torch.where(batch.loss_mask, values.double(), 0.0)
    return (masked.sum(1) / batch.loss_mask.sum(1)).tolist()


def _padded(rows: Sequence[list[int]], temperature: float, seeds: Tensor) -> TokenBatch:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.arange(tokens.shape[1]) == lengths[:, None] - 1  # the token that is drawn
    return TokenBatch(tokens, lengths, mask, temperature, seeds=seeds)
