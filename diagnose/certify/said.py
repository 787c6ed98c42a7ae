"""Types of what a server may say: anything else is a fault of the server, and never a value that is computed with."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_LEAST = -1e30
"""Below it a log-probability stands for minus infinity, as some servers write it."""
_ROUNDING = 1e-3
"""Log-probabilities of tokens that are all but certain may be rounded above 0."""


class Said(BaseModel):
    """A JSON object of a server. Keys that are not named are left aside; nothing is coerced."""

    model_config = ConfigDict(strict=True, frozen=True)


def _logprob(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a log-probability")
    if not _LEAST <= value < math.inf:  # NaN, too
        return math.nan
    if value > _ROUNDING:
        raise ValueError("a log-probability, which is at most 0")
    return float(value)


def _first_two(value: Any) -> Any:
    return tuple(value[:2]) if isinstance(value, list) else value


Count = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenId = Count
Name = Annotated[str, Field(max_length=1000)]
Logprob = Annotated[float, BeforeValidator(_logprob)]
"""Nats; null, NaN and what is not finite are NaN."""
Scored = Annotated[tuple[Logprob, TokenId], BeforeValidator(_first_two)]
"""SGLang's `[logprob, token, text]`, of which the text is left aside."""
