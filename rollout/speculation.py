"""What `rollout.speculation` may say, and where it cannot be had."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from fp8rl.numerics.errors import user_error
from fp8rl.numerics.io.section import Section

Source = Literal["siblings", "history"]


class Speculation(Section):
    """Draft tokens that other answers said, have the model compute several of them in one forward pass, and keep those
    that are drawn anyway. No token and no log-probability changes."""

    model_config = ConfigDict(serialize_by_alias=True)

    drafts: int = Field(default=4, ge=1, le=16)
    """Most tokens that are drafted for an answer in a forward pass; fewer or none where they would not pay."""
    source: Source = Field(default="history", alias="from")
    """Whose tokens are drafted. `siblings`: of answers to the same prompt at the same weights. `history`: of all that
    the engine has answered, to the same prompt first, also at earlier weights."""

    @property
    def width(self) -> int:
        """Tokens of an answer in one forward pass: its last one and the drafts."""
        return self.drafts + 1

    @property
    def reserve(self) -> int:
        """Tokens that SGLang keeps free in the KV cache behind each answer."""
        return 2 * self.width


def check_drafts(speculation: Speculation | None, cuda: bool) -> None:
    """Raise `UserError` if an engine with drafts is to run on a GPU."""
    if speculation is not None and cuda:
        raise user_error(
            "rollout.speculation",
            found=f"drafts={speculation.drafts} on a GPU",
            expected="null: a decode step there is a captured CUDA graph, of one token of each answer",
            remedy="Remove rollout.speculation.",
        )
