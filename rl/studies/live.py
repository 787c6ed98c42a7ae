"""The instruments of studies: one live trainer, chains of sums to teach it, and answers that it samples by itself.

In exact mode the engine's log-probabilities are the trainer's, and its tokens are a function of seeds and logits; so a
trainer that draws its own tokens samples what an engine would, and no engine is needed. Each study that samples proves
that on an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from numerics.config import NumericsConfig
from numerics.sampling import answer_seed
from numerics.spec import QuantSpec
from rl.run.batching import SftExample, batch_from_examples
from trainer.batch import TokenBatch
from trainer.config import TrainerConfig

if TYPE_CHECKING:
    from trainer.parallel import Layout
    from trainer.trainer import Trainer

DATA = Path("examples/data")
TRAIN, HELD_OUT = DATA / "arithmetic_train.jsonl", DATA / "arithmetic_eval.jsonl"
EOS, MAX_NEW_TOKENS = 2, 20
LONGEST = 64
ONE_RANK = TrainerConfig()


def exact(spec: QuantSpec | str = "fp8_block_pow2", precision: str = "fp8", mode: str = "exact") -> NumericsConfig:
    """Numerics of a trainer: the engine beside it, if there is one, runs the same spec, or BF16 where it cannot."""
    chosen = QuantSpec.preset(spec) if isinstance(spec, str) else spec
    both: dict[str, Any] = {"spec": chosen, "mode": mode, "trainer": precision}
    return NumericsConfig(**both, rollout="bf16")


@contextmanager
def world(config: TrainerConfig = ONE_RANK) -> Iterator[Layout]:
    """One rank in this process, as a trainer's actor starts it."""
    from numerics.compiler import enable_compiler
    from trainer import parallel

    enable_compiler()
    layout = parallel.initialize(config)
    try:
        yield layout
    finally:
        parallel.shutdown()


def trainer_of(
    model: Path,
    numerics: NumericsConfig,
    layout: Layout,
    *,
    config: TrainerConfig = ONE_RANK,
    steps: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Trainer:
    """A live trainer with the weights of a Hugging Face directory."""
    from trainer.trainer import Trainer

    length = LONGEST
    return Trainer(model, config, numerics, layout, seed=0, total_steps=steps, max_sequence_length=length, dtype=dtype)


@cache
def chains(path: Path) -> tuple[SftExample, ...]:
    """Questions and right answers of a data file, as token ids."""
    from transformers import AutoTokenizer

    from rl.studies.subjects import MODEL
    from rollout.data import Source, load_problems

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return tuple(
        SftExample(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p.question}], add_generation_prompt=True, return_dict=False
            ),
            [*tokenizer.encode(p.answer, add_special_tokens=False), EOS],
        )
        for p in load_problems(Source(path))
    )


def chain_batch(path: Path, seed: int, count: int) -> TokenBatch:
    """`count` chains of a file, chosen by a seed."""
    known = chains(path)
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))[:count]
    return batch_from_examples([known[index] for index in order.tolist()])


def sampled(trainer: Trainer, seed: int, prompts: int, answers: int, temperature: float = 1.0) -> TokenBatch:
    """Answers that the trainer samples: `answers` to each of `prompts` questions, row by row.

    Each token is drawn as the engine draws it, from the logits of a forward over the whole prefix. Its field
    `rollout_logprobs` is the trainer's log-probability of each.
    """
    known = chains(TRAIN)
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))[:prompts].tolist()
    rows = [list(known[index].prompt_ids) for index in order for _ in range(answers)]
    starts = [len(row) for row in rows]
    seeds = torch.tensor(
        [answer_seed(seed, 0, prompt, answer) for prompt in range(prompts) for answer in range(answers)]
    )
    open_rows = list(range(len(rows)))
    for _ in range(MAX_NEW_TOKENS):
        batch = _padded([rows[index] + [EOS] for index in open_rows], temperature, seeds[open_rows])
        order_of_rows, scored = trainer.score_routed(batch)
        assert scored.draws is not None
        for at, row in enumerate(order_of_rows):
            index = open_rows[row]
            rows[index].append(int(scored.draws[at, len(rows[index])]))
        open_rows = [index for index in open_rows if rows[index][-1] != EOS]
        if not open_rows:
            break
    batch = batch_from_examples([SftExample(row[:start], row[start:]) for row, start in zip(rows, starts, strict=True)])
    return batch.with_fields(rollout_logprobs=torch.where(batch.loss_mask, logprobs(trainer, batch), 0.0))


def logprobs(trainer: Trainer, batch: TokenBatch) -> Tensor:
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
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    return TokenBatch(tokens, lengths, mask, temperature, seeds=seeds)
