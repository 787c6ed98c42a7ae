"""The `gates:` and `guard:` sections of an experiment spec: when a run steps in, and what it keeps of the case."""

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
    """Fires when `metric` is beyond its bound for `for_steps` steps in a row; again only after the metric recovered."""

    metric: str
    """A metric of [metrics.md](metrics.md). A metric that is measured after the decision whether to update is judged in
    the next step, and cannot withhold an update: without updates it would be missing, or never change."""
    above: float | None = None
    """The gate fires above this value. A gate has either `above` or `below`."""
    below: float | None = None
    """The gate fires below this value."""
    recover: float | None = None
    """The gate is armed again once the metric is back at this value or better; null means within the bound."""
    for_steps: int = Field(default=1, ge=1)
    """Steps in a row that the metric has to be beyond its bound."""
    cooldown_steps: int = Field(default=0, ge=0)
    """Steps after a firing in which the gate does not fire again. It still withholds updates meanwhile."""
    action: Action = "warn"
    """`warn` reports the firing. `tighten_tis` lowers the cap of the importance weight, `enable_r3` replays the
    engine's experts, both from this batch to the end of the run. `skip_step` withholds updates until the metric has
    recovered; so do `resync`, with a verified sync, and `bf16_both`, where both sides also fall back to BF16.
    `checkpoint_and_stop` ends the run."""
    tis_cap: float | None = Field(default=None, ge=1.0)
    """The lower cap of `tighten_tis`; null means 1."""

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
            side = "at most above" if upper else "at least below"
            raise ValueError(
                f"found recover={self.recover} with {self.bound} for {self.metric}, expected {side}. Correct recover"
            )
        if self.tis_cap is not None and self.action != "tighten_tis":
            raise ValueError(
                f"found tis_cap={self.tis_cap} with action {self.action}, expected tighten_tis. Remove tis_cap"
            )
        return self


class GuardSection(Section):
    """The reaction to a loss that is not finite, and the capsules that are kept when that happens or a gate fires."""

    nonfinite_loss: Literal["stop", "skip"] = "stop"
    """`stop` writes a checkpoint and ends the run; `skip` goes on with the next batch. Neither trains on this batch."""
    redraws: int = Field(default=8, ge=0)
    """How many answers of a step are audited, spread over the step: the trainer draws their tokens again, from its own
    logits and the tokens' seeds. Exact mode only; 0 turns the audit off."""
    capsules: int = Field(default=5, ge=2)
    """Most capsules that stay on disk: the first of the run, and the newest."""
    capsule_weights: bool = True
    """Keep the trainer's weights in a capsule too. Without them, `fp8rl rescore` needs `--model`."""
