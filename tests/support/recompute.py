"""A step of a run computed again from what lies in its directory: no engine, and none of the run's own objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.algorithms.base import Outcomes
from rl.experiment import read_resolved
from rl.run.records import train_metrics
from trainer.batch import TokenBatch
from trainer.config import TrainerConfig
from trainer.parallel import Layout


def first_step(run: Path, layout: Layout, config: TrainerConfig) -> tuple[dict[str, float], list[list[float]]]:
    """`train/...` of step 1, and the trainer's log-probabilities by trajectory, at the run's first weights."""
    from trainer import device
    from trainer.trainer import Trainer

    experiment = read_resolved(run / "spec.yaml")
    lines = [json.loads(line) for line in (run / "rollouts/step_1.jsonl").read_text().splitlines()]
    device.start(0, experiment.numerics_config())
    trainer = Trainer(
        Path(experiment.model.path),
        experiment.trainer,
        experiment.numerics_config(),
        layout,
        seed=experiment.run.seed,
        total_steps=experiment.run.steps,
        max_sequence_length=experiment.rollout.context_length,
    )
    batch = _batch(lines, experiment.rollout.temperature)
    outcomes = Outcomes(_column(lines, "reward"), _column(lines, "group").long(), _column(lines, "finished"))
    batch = batch.with_fields(advantages=experiment.algorithm.advantages(outcomes, batch))
    done = trainer.forward_backward(batch, experiment.algorithm.objective(batch))
    logprobs = torch.empty_like(done.result.logprobs)
    logprobs[done.rows] = done.result.logprobs
    by_row = [row[mask].tolist() for row, mask in zip(logprobs, batch.loss_mask)]
    return train_metrics(done.result, batch), by_row


def _column(lines: list[dict[str, Any]], name: str) -> Tensor:
    return torch.tensor([line[name] for line in lines])


def _batch(lines: list[dict[str, Any]], temperature: float) -> TokenBatch:
    rows = [line["prompt_ids"] + line["token_ids"] for line in lines]
    shape = len(rows), max(map(len, rows))
    tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    fields = {"rollout_logprobs": torch.zeros(shape)}
    for row, (ids, line) in enumerate(zip(rows, lines)):
        sampled = slice(len(line["prompt_ids"]), len(ids))
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, sampled] = True
        fields["rollout_logprobs"][row, sampled] = torch.tensor(line["rollout_logprobs"])
    return TokenBatch(tokens, torch.tensor([len(row) for row in rows]), mask, temperature, fields)
