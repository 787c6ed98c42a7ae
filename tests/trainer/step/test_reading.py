"""Final hidden states and the head meet in one function, which may use the head as it likes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.batches import cross_entropy, random_batch
from tests.support.trainers import MakeTrainer
from trainer.step.batch import TokenBatch

CHUNK = 7


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_head_that_is_asked_piece_by_piece_gives_the_same_logprobs(
    kind: str, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    from trainer.step.passes import run_pass
    from trainer.step.reading import Head, Read, read_logprobs

    def in_pieces(hidden: Tensor, head: Head, batch: TokenBatch) -> Read:
        logits = torch.cat([head(piece) for piece in hidden.split(CHUNK)], 1)
        return read_logprobs(hidden, lambda _: logits, batch)

    path: Path = request.getfixturevalue(f"{kind}_path")
    trainer, batch = make_trainer(path, "fp8"), random_batch(rows=5)
    passes = [
        run_pass(trainer.optimizer.model, batch, trainer.layout, 256, 1, cross_entropy(batch), read)
        for read in (read_logprobs, in_pieces)
    ]
    assert torch.equal(passes[0].logprobs, passes[1].logprobs)
    assert passes[0].loss == passes[1].loss
