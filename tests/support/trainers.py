"""What the trainer's fixtures make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import TokenBatch

MakeTrainer = Callable[..., Any]
"""Makes a one-rank trainer of a model directory; see tests/trainer/conftest.py."""


def critic_values(policy: Any, path: Path, batch: TokenBatch, layout: Layout, **keys: bool) -> Tensor:
    """What a critic of the policy's settings and of these keys says of each token, in the order of the batch."""
    from fp8rl.trainer.roles import Critic

    config = policy.config.model_copy(update=keys)
    critic = Critic(path, config, policy.numerics, layout, seed=0, total_steps=9, max_sequence_length=batch.width)
    torch.nn.init.constant_(critic.model.output_layer.weight, 0.02)
    rows, values = critic.score(batch)
    return values[torch.tensor(rows).argsort()]
