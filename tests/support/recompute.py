"""A step of a run computed again from what lies in its directory: no engine, and none of the run's own objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.sampling import EVERY_TOKEN, Truncation
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.experiment import Experiment, read_resolved
from fp8rl.rl.mismatch.logprobs import drift_metrics, logprob_metrics
from fp8rl.rl.run.step import train_metrics
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import TokenBatch

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer


def first_step(run: Path, layout: Layout, config: TrainerSection) -> tuple[dict[str, float], list[list[float]]]:
    """`train/...` of step 1, and the trainer's log-probabilities by trajectory, at the run's first weights."""
    experiment = read_resolved(run / "spec.yaml")
    lines = _lines(run / "rollouts/step_1.jsonl")
    trainer = _trainer(experiment, Path(experiment.model.path), layout)
    batch = _batch(lines, experiment.rollout.temperature, experiment.rollout.truncation)
    outcomes = Outcomes(_column(lines, "reward"), _column(lines, "group").long(), _column(lines, "finished"))
    batch = batch.with_fields(advantages=experiment.algorithm.advantages(outcomes, batch))
    done = trainer.forward_backward(batch, experiment.algorithm.objective(batch))
    logprobs = torch.empty_like(done.result.logprobs)
    logprobs[done.rows] = done.result.logprobs
    by_row = [row[mask].tolist() for row, mask in zip(logprobs, batch.loss_mask)]
    return train_metrics(done.result, batch), by_row


def compared(run: Path, step: int) -> dict[str, float]:
    """`mismatch/...` and `drift/...` of a step from its files alone, without what the trainer drew again."""
    own, ahead = (_lines(run / f"rollouts/{kind}_{step}.jsonl") for kind in ("step", "ahead"))
    version = int(json.loads((run / f"manifests/step_{step - 1}.json").read_text())["version"])
    drifted = _scored(own)
    mismatch = _scored(own + ahead)
    tis_cap = read_resolved(run / "spec.yaml").algorithm.correction.tis_cap or 2.0
    return {
        **logprob_metrics(*mismatch[:3], tis_cap=tis_cap, fresh=mismatch[3] == version),
        **drift_metrics(*drifted[:3], drifted[3], version),
    }


def _scored(lines: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both log-probabilities, what was sampled and its versions, [rows, width] each."""
    width = max(len(line.get("prompt_ids", [])) + len(line["token_ids"]) for line in lines)
    train, rollout = torch.zeros(2, len(lines), width)
    mask, versions = torch.zeros(len(lines), width, dtype=torch.bool), torch.zeros(len(lines), width, dtype=torch.int64)
    for row, line in enumerate(lines):
        first = len(line.get("prompt_ids", []))
        told = {first + at for begin, end in line.get("told", []) for at in range(begin, end)}
        written = range(first, first + len(line["token_ids"]))
        mask[row, line.get("sampled", [at for at in written if at not in told])] = True
        for values, name in ((train, "train_logprobs"), (rollout, "rollout_logprobs"), (versions, "weight_versions")):
            values[row, mask[row]] = torch.tensor(line[name], dtype=values.dtype)
    return train, rollout, mask, versions


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def taught_step(
    run: Path, teacher: Path, answers: list[dict[str, Any]], layout: Layout, config: TrainerSection
) -> tuple[dict[str, float], list[list[float]]]:
    """`train/...` of step 1, and what a trainer at the weights of `teacher` says of the answers of another step."""
    return first_step(run, layout, config)[0], scores_of(run, teacher, answers, layout, config)


def trained_scores(
    run: Path, answers: list[dict[str, Any]], layout: Layout, config: TrainerSection
) -> list[list[float]]:
    """What a trainer at the run's last weights gives the `token_ids` of each answer after its `prompt_ids`, at
    temperature 1."""
    return scores_of(run, run / "model", answers, layout, config)


def scores_of(
    run: Path, model: Path, answers: list[dict[str, Any]], layout: Layout, config: TrainerSection
) -> list[list[float]]:
    """The same at the weights of a model directory."""
    return _scores(_trainer(read_resolved(run / "spec.yaml"), model, layout), answers)


def scores_beside(
    run: Path, adapted: list[dict[str, Any]], bare: list[dict[str, Any]], layout: Layout, config: TrainerSection
) -> tuple[list[list[float]], list[list[float]]]:
    """The same of a run of adapters: of one list of answers with its last adapters, of another without them."""
    from fp8rl.trainer.roles import WithoutAdapter

    experiment = read_resolved(run / "spec.yaml")
    assert experiment.adapter is not None
    adapter = experiment.adapter.model_copy(update={"start": str(run / "adapter")})
    trainer = _trainer(experiment, Path(experiment.model.path), layout, adapter)
    return _scores(trainer, adapted), _scores(WithoutAdapter(trainer), bare)


def _scores(scorer: Any, answers: list[dict[str, Any]]) -> list[list[float]]:
    batch = _batch([{"rollout_logprobs": [0.0] * len(a["token_ids"]), **a} for a in answers], 1.0)
    rows, scored = scorer.score_routed(batch)
    by_row = dict(zip(rows, scored.logprobs))
    return [by_row[row][mask].tolist() for row, mask in enumerate(batch.loss_mask)]


def _trainer(experiment: Experiment, model: Path, layout: Layout, adapter: AdapterSection | None = None) -> Trainer:
    from fp8rl.trainer.distributed import parallel
    from fp8rl.trainer.trainer import Trainer

    parallel.start(0, experiment.numerics_config())
    lengths = {"total_steps": experiment.run.steps, "max_sequence_length": experiment.rollout.context_length}
    own = {"seed": experiment.run.seed, "adapter": adapter, **lengths}
    return Trainer(TrainerSpec(model, experiment.trainer, experiment.numerics_config(), **own), layout)


def _column(lines: list[dict[str, Any]], name: str) -> Tensor:
    return torch.tensor([line[name] for line in lines])


def _batch(lines: list[dict[str, Any]], temperature: float, truncation: Truncation = EVERY_TOKEN) -> TokenBatch:
    rows = [line["prompt_ids"] + line["token_ids"] for line in lines]
    shape = len(rows), max(map(len, rows))
    tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    names = ["rollout_logprobs"] + ["teacher_logprobs"] * (lines[0].get("teacher_logprobs") is not None)
    fields = {name: torch.zeros(shape) for name in names}
    for row, (ids, line) in enumerate(zip(rows, lines)):
        sampled = slice(len(line["prompt_ids"]), len(ids))
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, sampled] = True
        for name in names:
            fields[name][row, sampled] = torch.tensor(line[name])
    lengths = torch.tensor([len(row) for row in rows])
    return TokenBatch(tokens, lengths, mask, temperature, fields, truncation=truncation)
