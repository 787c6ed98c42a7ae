"""Trainers of tests, and what they say, in the order of the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.process import all_gathered, rank
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import LENGTH

MakeTrainer = Callable[..., Any]
"""Makes a one-rank trainer of a model directory; see tests/trainer/conftest.py."""
Models = dict[str, Path]
"""Directories of a small model of each kind: moe, dense, latent, linear."""
POW2 = QuantSpec.preset("fp8_block_pow2")
SIZES: dict[str, Any] = {"seed": 0, "total_steps": 100, "max_sequence_length": LENGTH}


def trainer_on(
    layout: Layout, config: TrainerSection, path: Path, precision: str = "fp8", numerics: Any = None, **options: Any
) -> Any:
    """A rank's trainer, in exact mode unless `numerics` has another. options: further ones of the trainer."""
    from fp8rl.trainer.trainer import Trainer

    settings = {"spec": POW2, "trainer": precision, "k_splits": config.tp} | (numerics or {})
    return Trainer(TrainerSpec(path, config, NumericsConfig(**settings), **SIZES | options), layout)


def in_fp8(trainer: Any) -> list[str]:
    """The names of the weights that the last forward pass multiplied in FP8."""
    from fp8rl.trainer.modules.weights import matrices

    used = {id(weight) for weight, _ in trainer.cache.operands()}
    asked = ((name, p) for name, p in trainer.model.named_parameters() if id(p) in used)
    return [matrix for name, parameter in asked for matrix, _ in matrices(name, parameter)]


def in_order(rows: list[int], values: Tensor) -> Tensor:
    return values[torch.tensor(rows).argsort()]


def whole(parts: list[Any]) -> Tensor:
    """Values of all rows, of each by one rank alone; None of ranks that report none."""
    parts = [part for part in parts if part is not None]
    return in_order([row for rows, _ in parts for row in rows], torch.cat([values for _, values in parts]))


def scored(trainer: Any, batch: TokenBatch) -> Tensor:
    return in_order(*trainer.score(batch))


def passed(trainer: Any, batch: TokenBatch, objective: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a pass says of each token, and its gradients."""
    done = trainer.forward_backward(batch, objective)
    said = {name: getattr(done.result, name) for name in ("logprobs", "routes", "draws")}
    return {name: in_order(done.rows, x) for name, x in said.items() if x is not None}, gradients(trainer)


def gradients(trainer: Any) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def train(trainer: Any, first: int, last: int, **size: Any) -> list[tuple[float, ...]]:
    """Loss, gradient norm and learning rate of a step for each seed. size: of the batches."""
    out = []
    for seed in range(first, last):
        batch = random_batch(seed=seed, **size)
        result = trainer.train_step(batch, cross_entropy(batch)).result
        out.append((result.loss, result.grad_norm, trainer.optimizer.lr))
    return out


def stage_checkpoint(trainer: Any, path: Path, extra: dict[str, Any]) -> Any:
    from fp8rl.trainer.checkpoint import checkpoint

    return checkpoint.stage(path, {"": trainer.trained}, trainer.weight_version, extra, {})


def save_checkpoint(trainer: Any, path: Path, extra: dict[str, Any]) -> None:
    """Write a checkpoint at once. A run's actors train while they write."""
    staged = stage_checkpoint(trainer, path, extra)
    written = all_gathered(staged.write())
    if rank() == 0:
        staged.publish(written)
    all_gathered(None)  # so that no rank reads it earlier


def critic_on(layout: Layout, policy: Any, path: Path, **keys: Any) -> Any:
    """A critic of the policy's settings and of these keys, whose head says something."""
    from fp8rl.trainer.roles import Critic

    critic = Critic(TrainerSpec(path, policy.config.model_copy(update=keys), policy.numerics, **SIZES), layout)
    if critic.model.post_process:
        with torch.no_grad():
            critic.model.output_layer.weight.copy_(torch.linspace(-0.1, 0.1, critic.model.config.hidden_size)[None])
    critic.optimizer.inner.reload_model_params()
    return critic


def spread(trainer: Any, size: float = 0.02) -> None:
    """Move every B of an adapter away from zero."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if name.endswith("lora_b"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * size)
    trainer.weights_changed()
