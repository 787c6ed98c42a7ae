"""The trainer computes what docs/exactness.md says: a forward written from that page has its log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.upcycle import upcycle
from lab.bench.float64 import logprobs
from lab.bench.rounded import Rounded
from tests.support.batches import random_batch
from tests.support.padded import dense
from tests.support.trainers import MakeTrainer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "mixture"])
def test_a_second_forward_agrees_with_the_trainer(mixture: bool, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    path = dense(tmp_path / "dense", torch.bfloat16)
    if mixture:
        upcycle(path, path := tmp_path / "mixture", layers=1)
    batch, forward = random_batch(), Rounded(path)
    rows, scored = make_trainer(path, precision="fp8").score(batch)
    apart = []
    for row, found in zip(rows, scored, strict=True):
        tokens, targets = batch.tokens[row], int(batch.lengths[row]) - 1
        expected = logprobs(forward(tokens), tokens, len(tokens) - 1)
        apart.append((found[1:] - expected)[:targets].abs())
    assert torch.cat(apart).le(1e-6).float().mean() >= 0.98
