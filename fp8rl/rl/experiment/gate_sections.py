"""The `gates:` and `guard:` sections of an experiment spec: when a run intervenes, and what it then records."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from fp8rl.numerics.core.errors import shown
from fp8rl.numerics.core.section import Section
from fp8rl.rl.record.metrics import describe, nearest_metric

Action = Literal["warn", "tighten_tis", "enable_r3", "skip_step", "resync", "bf16_both", "checkpoint_and_stop"]

SEVERITY: tuple[Action, ...] = get_args(Action)
"""The actions, the mildest first. The actions of one step are taken in this order."""

WITHHOLDING: frozenset[Action] = frozenset({"skip_step", "resync", "bf16_both", "checkpoint_and_stop"})
"""Actions under which the batch that fired the gate is not trained on."""


class GateSection(Section):
    """A gate fires when `metric` is beyond its bound for `for_steps` steps in a row. It fires again only after the
    metric has recovered."""

    metric: str
    """A metric of [metrics.md](metrics.md). A *late* metric is judged in the next step. A gate on it cannot withhold
    updates, because without updates it would be missing, or never change."""
    above: float | None = None
    """The gate fires above this value. A gate has either `above` or `below`."""
    below: float | None = None
    """The gate fires below this value."""
    recover: float | None = None
    """The gate can fire again when the metric is back at this value or better. Null: when it is within the bound."""
    for_steps: int = Field(default=1, ge=1)
    """Number of steps in a row in which the metric must be beyond its bound."""
    cooldown_steps: int = Field(default=0, ge=0)
    """Number of steps after a firing in which the gate does not fire again. It may still withhold updates."""
    action: Action = "warn"
    """`warn`: reports the firing. `tighten_tis`: lowers the cap of the importance weight, from this batch to the end of
    the run. `enable_r3`: replays the engine's experts, also to the end of the run. `skip_step`: withholds updates until
    the metric has recovered. `resync`: as `skip_step`, with a verified sync. `bf16_both`: as `skip_step`, and both
    sides fall back to BF16. `checkpoint_and_stop`: ends the run."""
    tis_cap: float | None = Field(default=None, ge=1.0)
    """The new cap of `tighten_tis`. Null: 1."""

    @property
    def bound(self) -> str:
        """The bound in words, e.g. `above 0.05`."""
        return f"above {self.above}" if self.above is not None else f"below {self.below}"

    @field_validator("metric")
    @classmethod
    def _is_a_metric(cls, name: str) -> str:
        if describe(name) is None:
            nearest = nearest_metric(name)
            raise ValueError(f"found {shown(name)}, expected a metric of the run. Did you mean {nearest}?")
        return name

    @model_validator(mode="after")
    def _bounds_and_action_agree(self) -> GateSection:
        if (self.above is None) == (self.below is None):
            raise ValueError(
                f"found above={self.above} and below={self.below} for {self.metric}, expected exactly one of above and "
                "below. Give one bound"
            )
        upper, bound = self.above is not None, self.above if self.above is not None else self.below or 0.0
        if self.recover is not None and (self.recover > bound if upper else self.recover < bound):
            side = "recover <= above" if upper else "recover >= below"
            raise ValueError(
                f"found recover={self.recover} with {self.bound} for {self.metric}, expected {side}. Correct recover"
            )
        if self.tis_cap is not None and self.action != "tighten_tis":
            raise ValueError(
                f"found tis_cap={self.tis_cap} with action={self.action}, expected action=tighten_tis. Remove tis_cap"
            )
        return self


class GuardSection(Section):
    """What to do when a loss is not finite, and which capsules to keep. A capsule is written when a loss is not finite,
    and when a gate fires."""

    nonfinite_loss: Literal["stop", "skip"] = "stop"
    """`stop`: writes a checkpoint and ends the run. `skip`: goes on with the next batch. Neither trains on this one."""
    redraws: int = Field(default=8, ge=0)
    """Number of answers of a step, spread over the step, whose tokens the trainer draws again from its own logits and
    the tokens' seeds. Exact mode only; 0 turns this check off."""
    capsules: int = Field(default=5, ge=2)
    """Largest number of capsules that stay on disk: the first of the run, and the newest ones."""
    capsule_weights: bool = True
    """Whether a capsule also has the trainer's weights. Without them, `fp8rl explain` needs `--model`."""
