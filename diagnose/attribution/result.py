"""What an attribution says. d is trainer minus rollout log-probability of a token, in nats."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

CauseName = Literal["weights", "sampler", "state", "op", "routing", "quantization", "op definitions"]


@dataclasses.dataclass(frozen=True)
class OpDifference:
    """The engine's op against the trainer's, on the trainer's inputs.

    layer: None outside the layers. differing: fraction of output elements that are not equal.
    relative_rms: ||trainer - engine|| / ||trainer||, infinite if one side alone is not finite.
    largest: of the absolute differences.
    """

    layer: int | None
    op: str
    differing: float
    relative_rms: float
    largest: float


@dataclasses.dataclass(frozen=True)
class ExpertDifference:
    """One expert. tokens: that the trainer sent to it.

    relative_rms: of its own outputs on the trainer's inputs. abs_diff_mean, abs_diff_rest: mean |d| of its tokens and
    of all others, trainer against the engine's own forward; NaN without such tokens.
    """

    layer: int
    expert: int
    tokens: int
    relative_rms: float
    abs_diff_mean: float
    abs_diff_rest: float


@dataclasses.dataclass(frozen=True)
class PositionDifference:
    """Sampled tokens at positions `start` to `stop` - 1 of their sequences, prompts counted: mean |d|."""

    start: int
    stop: int
    tokens: int
    abs_diff_mean: float


@dataclasses.dataclass(frozen=True)
class Cause:
    """One cause taken away: mean |d| before and after, on the same tokens. note: what was changed."""

    name: CauseName
    before: float
    after: float
    note: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """A sentence that answers where the mismatch comes from, and what it speaks of.

    tensors: HF names of weights that differ.
    """

    cause: CauseName
    text: str
    op: str | None = None
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Where a mismatch comes from.

    findings: ranked, the first is the answer; none if both sides agree.

    abs_diff_mean: mean |d| of the `tokens` sampled tokens as they were recorded. live_abs_diff_mean: between trainer
    and engine as they are now, over the `traced_tokens` of them that were traced. stream: by layer, how far the
    engine's residual stream has drifted from the trainer's where it enters the layer (relative RMS).
    """

    findings: tuple[Finding, ...]
    abs_diff_mean: float
    tokens: int
    live_abs_diff_mean: float = 0.0
    traced_tokens: int = 0
    ops: tuple[OpDifference, ...] = ()
    stream: tuple[float, ...] = ()
    causes: tuple[Cause, ...] = ()
    experts: tuple[ExpertDifference, ...] = ()
    positions: tuple[PositionDifference, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that are not finite become null."""
        return _finite(dataclasses.asdict(self))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
