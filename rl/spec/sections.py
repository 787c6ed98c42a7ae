"""The sections of an experiment spec that belong to `rl`; rollout, trainer and sync are described in their packages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from numerics.config import Mode, NumericsConfig, RolloutPrecision, RouterReplay, TrainerPrecision
from numerics.errors import UserError
from numerics.spec import LAYER_EXCEPTIONS, ROLES, Format, Granularity, QuantSpec, Scale


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

    mode: Mode = "exact"
    """`exact`: both sides run the shared ops, so that their logprobs are equal. `native`: each runs its library's own
    ops, and only the FP8 products are shared."""
    preset: Literal["bf16", "fp8_block_pow2", "fp8_block_fp32"] = "fp8_block_pow2"
    weight: TensorOverride = TensorOverride()
    activation: TensorOverride = TensorOverride()
    gradient: TensorOverride = TensorOverride()
    # Strictness would refuse the list that YAML gives.
    scope: tuple[str, ...] | None = Field(default=None, strict=False)
    """Module kinds whose products are quantized, by exact name (`q_proj`, ..., `experts.down_proj`); null leaves the
    preset's. An FP8 engine quantizes all kinds, so a smaller scope needs `rollout: bf16`."""
    first_layers_bf16: int = Field(default=0, ge=0)
    """Decoder layers at the start whose products stay in BF16, on both sides."""
    last_layers_bf16: int = Field(default=0, ge=0)
    """The same at the end."""
    trainer: TrainerPrecision = "fp8"
    rollout: RolloutPrecision = "fp8"
    router_replay: RouterReplay = "off"
    """`record`: the engine reports each token's experts, and their agreement with the trainer's is measured. `replay`:
    the trainer takes the engine's experts (R3)."""

    @field_validator("router_replay", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: Any) -> Any:
        return "off" if value is False else value

    @property
    def quantizes(self) -> bool:
        """Whether any side computes in FP8."""
        return self.trainer != "bf16" or self.rollout != "bf16"

    def overrides(self) -> dict[str, Any]:
        """What differs from the preset, e.g. `{"weight": {"scale": "fp32"}}`; no preset excepts layers."""
        roles = {role: getattr(self, role).model_dump(exclude_none=True) for role in ROLES}
        changes: dict[str, Any] = {role: fields for role, fields in roles.items() if fields}
        changes |= {key: getattr(self, key) for key in LAYER_EXCEPTIONS if getattr(self, key)}
        return changes if self.scope is None else changes | {"scope": list(self.scope)}

    def quant_spec(self) -> QuantSpec:
        """The preset with the overrides applied."""
        return QuantSpec.preset(self.preset).override(self.overrides())

    def config(self, tp: int) -> NumericsConfig:
        """What trainer and engine are started with; `tp` fixes the reduction order of row-parallel products."""
        return NumericsConfig(
            mode=self.mode,
            spec=self.quant_spec(),
            trainer=self.trainer,
            rollout=self.rollout,
            k_splits=tp if self.mode == "exact" else 1,
            router_replay=self.router_replay,
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


class RejectionSection(Section):
    """What lies outside [low, high] gives no loss; the denominators of the loss stay those of the whole batch."""

    name: Literal["icepop", "geometric", "mis"]
    """`icepop`: tokens by their ratio trainer / rollout, which is also their weight. `geometric`: sequences by the
    geometric mean of their tokens' ratios. `mis`: sequences by the product of their tokens' ratios, which is also their
    weight."""
    low: float | None = Field(default=None, ge=0.0)
    """Null means 0.5 for icepop, 0.99 for geometric; mis has no lower bound."""
    high: float | None = None
    """Null means 5.0 for icepop, 1.01 for geometric, 2.0 for mis."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        bounds = _REJECTION_BOUNDS.get(str(values.get("name"))) if isinstance(values, dict) else None
        return values if bounds is None else bounds | {key: x for key, x in values.items() if x is not None}

    @model_validator(mode="after")
    def _around_one(self) -> RejectionSection:
        if self.name == "mis" and self.low is not None:
            raise ValueError(f"found low={self.low} with mis, expected none, as it has no lower bound. Remove low")
        if not (self.low or 0.0) < 1.0 < (self.high or 0.0):
            raise ValueError(
                f"found low={self.low} and high={self.high}, expected low < 1 < high, as 1 is the ratio of equal "
                "probabilities. Correct the bounds"
            )
        return self


_REJECTION_BOUNDS = {
    "icepop": {"low": 0.5, "high": 5.0},
    "geometric": {"low": 0.99, "high": 1.01},
    "mis": {"high": 2.0},
}
"""Of icepop as in the INTELLECT-3 report; of geometric and mis as is usual in published recipes."""


class GrpoAlgorithm(Section):
    name: Literal["grpo"] = "grpo"
    group_norm_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.28, gt=0.0)
    tis_cap: float | None = Field(default=2.0, ge=1.0)
    """Cap of the importance weight trainer / rollout. Null leaves the weight out, or that of `icepop` and `mis` as it
    is."""
    tis_level: Literal["token", "sequence"] = "token"
    """Whether the weight is a token's own ratio or the product of its sequence's."""
    rejection: RejectionSection | None = None
    """Tokens or sequences that are not trained on because trainer and engine disagree too much."""
    loss_aggregation: Literal["token_mean", "seq_mean"] = "token_mean"

    @model_validator(mode="after")
    def _icepop_weighs_tokens(self) -> GrpoAlgorithm:
        if self.rejection is not None and self.rejection.name == "icepop" and self.tis_level == "sequence":
            raise ValueError(
                "found tis_level=sequence with rejection icepop, expected token, as icepop weighs each token by its "
                "own ratio. Set algorithm.tis_level=token, or another rejection"
            )
        return self


class SftAlgorithm(Section):
    name: Literal["sft"]
    batch_size: int = Field(default=64, ge=1)
    """Question and answer pairs per step."""


Algorithm = Annotated[GrpoAlgorithm | SftAlgorithm, Field(discriminator="name")]


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
