"""Scored batches with known differences, and what a capsule is written from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.guard.capsule import write_capsule
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.manifest import Manifest
from tests.support.experiments import experiment
from tests.support.paths import new_run

WIDTH, LAYERS, TOP_K = 6, 2, 3
VERSION = 3


def scored_batch(*differences: list[float]) -> ScoredBatch:
    """One row for each list of d: two tokens of prompt, then the sampled ones."""
    rows = len(differences)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2 + len(d) for d in differences])
    position = torch.arange(WIDTH)
    mask = (position >= 2) & (position < lengths[:, None])
    rollout = torch.where(mask, -torch.rand(rows, WIDTH, generator=draw), 0.0)
    d = torch.zeros(rows, WIDTH)
    d[mask] = torch.tensor([value for row in differences for value in row])
    routes = torch.randint(0, 8, (rows, WIDTH, LAYERS, TOP_K), generator=draw).short()
    batch = TokenBatch(
        tokens=torch.randint(0, 100, (rows, WIDTH), generator=draw), lengths=lengths, loss_mask=mask, temperature=0.7,
        fields={"rollout_logprobs": rollout, "advantages": mask.float()}, routes=routes, replay=True,
    )  # fmt: skip
    return ScoredBatch(batch, torch.where(mask, VERSION, 0), VERSION, rollout + d, routes.flip(0))


@dataclasses.dataclass(frozen=True)
class CapsuleRun:
    """A run's directory with a resolved experiment and a manifest: what capsules are written into and from."""

    files: RunDir
    experiment: Experiment
    numerics: NumericsConfig

    @classmethod
    def make(cls, folder: Path, **guard: Any) -> CapsuleRun:
        files, settings = new_run(folder / "run"), experiment(guard=guard)
        files.experiment.write_text(settings.to_yaml())
        numerics = settings.numerics_config()
        files.manifest(VERSION).parent.mkdir()
        Manifest(str(VERSION), numerics.rollout_spec.digest(), {"a.weight": "1234@3"}).save(files.manifest(VERSION))
        return cls(files, settings, numerics)

    def write(
        self, step: int, why: Sequence[str], seen: ScoredBatch, rows: Sequence[int], tis_cap: float = 2.0, *,
        weights: bool = True, manifest: Path | None = None, held: Sequence[Mapping[str, str]] = (),
    ) -> Path:  # fmt: skip
        """The capsule of `step`."""
        manifest = manifest or self.files.manifest(VERSION)
        kept: dict[str, Any] = {"step": step, "why": why, "rows": rows, "manifest": manifest, "held": held}
        kept |= {"numerics": self.numerics, "experiment": self.files.experiment}
        seen = dataclasses.replace(seen, tis_cap=tis_cap)
        write_capsule(self.files.capsule(step), seen, export if weights else None, **kept)
        return self.files.capsule(step)


def export(path: Path) -> None:
    """A directory of weights."""
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
