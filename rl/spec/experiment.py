"""The experiment spec: every choice of a run in one frozen, validated object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from numerics.config import NumericsConfig
from rl.spec.gates import GateSection, GuardSection
from rl.spec.sections import (
    Algorithm,
    CheckpointSection,
    DataSection,
    EvalSection,
    GrpoAlgorithm,
    ModelSection,
    NumericsSection,
    RunSection,
    Section,
    TrackingSection,
)
from rollout.config import RolloutConfig
from trainer.config import TrainerConfig
from weight_sync.config import SyncConfig


class ExperimentSpec(Section):
    """What `fp8rl train` runs. Build one with :func:`rl.spec.load_spec` or :func:`rl.spec.parse_spec`."""

    run: RunSection = RunSection()
    model: ModelSection
    numerics: NumericsSection = NumericsSection()
    data: DataSection
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: Algorithm = GrpoAlgorithm()
    sync: SyncConfig = SyncConfig()
    # Strictness would refuse the list that YAML gives; the gates inside stay strict.
    gates: tuple[GateSection, ...] = Field(default=(), strict=False)
    guard: GuardSection = GuardSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def run_directory(self) -> Path:
        return Path(self.run.dir) / self.run.name

    def numerics_config(self) -> NumericsConfig:
        """The numerics of both sides, with the reduction order of this trainer layout."""
        return self.numerics.config(self.trainer.tp)

    def to_dict(self) -> dict[str, Any]:
        """Plain YAML types, every default written out."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved spec; `parse_spec(yaml.safe_load(text))` gives an equal object."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)
