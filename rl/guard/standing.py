"""What gates have changed for the rest of a run, and where each of them stands. Checkpoints carry it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.io.section import validated
from fp8rl.rl.guard.gates import RuleState
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.trainer.checkpoint.files import read_about


@dataclasses.dataclass
class Standing:
    """What gates have changed for good.

    tis_cap: the cap of the importance weight that a gate tightened; None: as the spec has it.

    router_replay: a gate turned the replay of the engine's experts on. bf16: both sides fell back to BF16.
    rules: see `Gates.state`.
    """

    tis_cap: Annotated[float, Field(ge=1.0)] | None = None
    router_replay: bool = False
    bf16: bool = False
    rules: Mapping[str, RuleState] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_checkpoint(cls, run: RunDir, step: int | None) -> Standing:
        """The standing as the checkpoint of `step` has it; that of a new run if there is none."""
        if step is None:
            return cls()
        standing = read_about(run.checkpoint(step)).extra.get("standing", {})
        where = f"checkpoint of step {step}: standing"
        return validated(TypeAdapter(cls).validate_python, standing, where, "Go on from an older checkpoint.")

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)

    def numerics(self, configured: NumericsConfig) -> NumericsConfig:
        """What both sides run: the spec's, or BF16 on both. Neither side ever falls back alone."""
        return dataclasses.replace(configured, trainer="bf16", rollout="bf16") if self.bf16 else configured
