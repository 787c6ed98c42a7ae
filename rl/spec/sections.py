"""The sections of an experiment spec that belong to `rl`; rollout, trainer and sync are described in their packages."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from numerics.config import NumericsConfig, RolloutPrecision, TrainerPrecision
from numerics.errors import UserError, shown
from numerics.spec import ROLES, Format, Granularity, QuantSpec, Scale
from rl.metrics import METRICS


class Section(BaseModel):
    """Unknown keys are refused, nothing is coerced (`"3"` is no integer), values are fixed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Folder of the run inside `dir`."""
    dir: str = Field(default="runs", min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int = Field(default=60, ge=1)
    """Optimizer steps."""


class ModelSection(Section):
    path: str = Field(min_length=1)
    """Hugging Face directory: config.json, safetensors weights, tokenizer."""


class TensorOverride(Section):
    """Fields of one role's TensorSpec that replace the preset's."""

    format: Format | None = None
    granularity: Granularity | None = None
    group: int | None = Field(default=None, ge=1)
    scale: Scale | None = None


class NumericsSection(Section):
    """One quantization spec for both sides, and the precision that each side runs."""

    mode: Literal["exact"] = "exact"
    """Both sides run the shared ops, so that their logprobs are equal."""
    preset: Literal["bf16", "fp8_block_pow2", "fp8_block_fp32"] = "fp8_block_pow2"
    weight: TensorOverride = TensorOverride()
    activation: TensorOverride = TensorOverride()
    gradient: TensorOverride = TensorOverride()
    # Strictness would refuse the list that YAML gives.
    scope: tuple[str, ...] | None = Field(default=None, strict=False)
    """Module kinds whose products are quantized, by exact name (`q_proj`, ..., `experts.down_proj`); null leaves the
    preset's. An FP8 engine quantizes all kinds, so a smaller scope needs `rollout: bf16`."""
    trainer: TrainerPrecision = "fp8"
    rollout: RolloutPrecision = "fp8"

    @property
    def quantizes(self) -> bool:
        """Whether any side computes in FP8."""
        return self.trainer != "bf16" or self.rollout != "bf16"

    def overrides(self) -> dict[str, Any]:
        """The fields given per role and the scope, e.g. `{"weight": {"scale": "fp32"}}`."""
        roles = {role: getattr(self, role).model_dump(exclude_none=True) for role in ROLES}
        changes: dict[str, Any] = {role: fields for role, fields in roles.items() if fields}
        return changes if self.scope is None else changes | {"scope": list(self.scope)}

    def quant_spec(self) -> QuantSpec:
        """The preset with the overrides applied."""
        return QuantSpec.preset(self.preset).override(self.overrides())

    def config(self, tp: int) -> NumericsConfig:
        """What trainer and engine are started with; `tp` fixes the reduction order of row-parallel products."""
        return NumericsConfig(
            mode=self.mode, spec=self.quant_spec(), trainer=self.trainer, rollout=self.rollout, k_splits=tp
        )

    @model_validator(mode="after")
    def _spec_serves_both_sides(self) -> NumericsSection:
        try:
            quantized = self.config(tp=1).spec.quantized
        except UserError as error:
            raise ValueError(f"found {self.overrides()} over preset {self.preset}: {error}") from error
        if self.quantizes and not quantized:
            raise ValueError(
                f"found trainer={self.trainer} and rollout={self.rollout}, expected bf16 for both, as the spec (preset "
                f"{self.preset}) quantizes nothing. Set numerics.trainer=bf16 and numerics.rollout=bf16, or choose an "
                "FP8 preset"
            )
        return self


class DataSection(Section):
    train: str = Field(min_length=1)
    """JSON lines with `question` and `answer` (GSM8K's shape)."""
    eval: str | None = Field(default=None, min_length=1)
    """Held-out problems in the same form; needed unless `eval.problems` is 0."""
    reward: Literal["integer", "math"] = "integer"
    """`integer`: exact integer after the last `####`; `math`: math-verify."""


class GrpoAlgorithm(Section):
    name: Literal["grpo"] = "grpo"
    group_norm_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.28, gt=0.0)
    tis_cap: float | None = Field(default=2.0, ge=1.0)
    """Cap of the truncated importance weight trainer / rollout; null leaves the weight out."""
    loss_aggregation: Literal["token_mean", "seq_mean"] = "token_mean"


class SftAlgorithm(Section):
    name: Literal["sft"]
    batch_size: int = Field(default=64, ge=1)
    """Question and answer pairs per step."""


Algorithm = Annotated[GrpoAlgorithm | SftAlgorithm, Field(discriminator="name")]


class GateSection(Section):
    """Fires when `metric` stays beyond its bound for `for_steps` steps in a row."""

    metric: str
    """A name of `rl.metrics.METRICS`."""
    above: float | None = None
    below: float | None = None
    for_steps: int = Field(default=1, ge=1)
    action: Literal["warn"] = "warn"

    @field_validator("metric")
    @classmethod
    def _is_a_metric(cls, name: str) -> str:
        if name not in METRICS:
            (nearest,) = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
            raise ValueError(f"found {shown(name)}, expected a metric of the run. Did you mean {nearest}?")
        return name

    @model_validator(mode="after")
    def _one_bound(self) -> GateSection:
        if (self.above is None) == (self.below is None):
            raise ValueError(
                f"found above={self.above} and below={self.below} for {self.metric}, expected exactly one of above and "
                "below. Give one bound"
            )
        return self


class CheckpointSection(Section):
    every: int = Field(default=20, ge=1)
    """Steps between checkpoints; the last step always gets one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""


class EvalSection(Section):
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    problems: int = Field(default=200, ge=0)
    """Held-out problems, answered greedily; 0 turns evaluation off."""


class WandbSection(Section):
    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = Field(default="fp8rl", min_length=1)


class TrackingSection(Section):
    wandb: WandbSection = WandbSection()
