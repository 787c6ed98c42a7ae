"""A trajectory as text: who said what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from fp8rl.rollout.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Said = tuple[Literal["model", "environment"], str]


def transcript(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[Said]:
    """Each turn after the prompt, in order, without the end of turn that ends the answer."""
    return [(by, tokenizer.decode(ids)) for by, ids in _spans(trajectory)]


def _spans(trajectory: Trajectory) -> Iterator[tuple[Literal["model", "environment"], list[int]]]:
    ids = trajectory.token_ids[:-1] if trajectory.finished and trajectory.stopped else trajectory.token_ids
    at = 0
    for begin, end in trajectory.told:
        yield "model", ids[at:begin]
        yield "environment", ids[begin:end]
        at = end
    yield "model", ids[at:]
