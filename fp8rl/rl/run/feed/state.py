"""The state of the feed in a checkpoint: its place in the data, and groups that were answered before their step.

The groups are in a file of the checkpoint, one JSON line each; the rest is in the checkpoint's `extra`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fp8rl.numerics.core.reading import whole_json_lines
from fp8rl.numerics.core.section import validated
from fp8rl.rl.record.rollouts import LogProb
from fp8rl.rollout.types import Group, KeptTokens, Trajectory
from fp8rl.trainer.checkpoint.files import read_about

GROUPS = "groups.jsonl"
"""Name of the groups' file in a checkpoint."""
_OF_A_ROW = ("token_ids", "logprobs", "weight_versions", "finished", "stopped", "outcome", "failed")
"""Fields of a `Trajectory`. A `SavedGroup` has a list of each, under the same name."""


@dataclasses.dataclass(frozen=True)
class SavedGroup:
    """The answers to one prompt of a later step."""

    number: int
    prompt_ids: list[int]
    """[P], the tokens of the prompt."""
    seeds: list[int]
    """Seeds of the group. The fields below are by row, in the seeds' order; see `rollout.types.Trajectory`."""
    token_ids: list[list[int]]
    logprobs: list[list[LogProb]]
    weight_versions: list[list[int]]
    finished: list[bool]
    stopped: list[bool]
    told: list[list[tuple[int, int]]]
    outcome: list[dict[str, float]]
    failed: list[bool]
    row_prompts: list[list[int]] = dataclasses.field(default_factory=list)
    """Prompts of the rows. This field and the next two are empty if each seed has one row, with the group's prompt."""
    row_seeds: list[int] = dataclasses.field(default_factory=list)
    branches: list[int] = dataclasses.field(default_factory=list)
    supports: list[list[list[int]] | None] | None = None
    likely: list[list[LogProb] | None] | None = None
    """The log-probabilities of `supports`, if these are the likeliest tokens."""

    @classmethod
    def of(cls, number: int, group: Group, answers: Sequence[Trajectory]) -> SavedGroup:
        plain = [(group.prompt.token_ids, seed) for seed in group.seeds]
        own = [] if [(answer.prompt_ids, answer.seed) for answer in answers] == plain else answers
        kept = [answer.supports for answer in answers]
        likely = [None if each is None or each.logprobs is None else each.logprobs.tolist() for each in kept]
        return cls(
            number=number,
            prompt_ids=group.prompt.token_ids,
            seeds=list(group.seeds),
            row_prompts=[answer.prompt_ids for answer in own],
            row_seeds=[answer.seed for answer in own],
            branches=[answer.branch for answer in own],
            told=[list(answer.environment_spans) for answer in answers],
            supports=[None if each is None else each.lists() for each in kept] if any(kept) else None,
            likely=likely if any(likely) else None,
            **{name: [getattr(answer, name) for answer in answers] for name in _OF_A_ROW},
        )

    def answers(self, group: Group) -> bool:
        """Return whether these are the answers that `group` asks for."""
        return self.prompt_ids == group.prompt.token_ids and tuple(self.seeds) == group.seeds

    def trajectories(self) -> list[Trajectory]:
        return [
            Trajectory(
                prompt_ids=self.row_prompts[row] if self.row_prompts else self.prompt_ids,
                group=0,
                seed=seed,
                environment_spans=tuple(self.told[row]),
                branch=self.branches[row] if self.branches else 0,
                supports=self._supports(row),
                **{name: getattr(self, name)[row] for name in _OF_A_ROW},
            )
            for row, seed in enumerate(self.row_seeds or self.seeds)
        ]

    def _supports(self, row: int) -> KeptTokens | None:
        kept = self.supports[row] if self.supports else None
        return None if kept is None else KeptTokens.of(kept, self.likely[row] if self.likely else None)


@dataclasses.dataclass(frozen=True)
class FeedState:
    """The position of a feed in the data, and its groups under way."""

    next: int
    """Number of the first prompt that was not admitted yet."""
    admitted: list[int]
    """Numbers of prompts that were admitted and are not trained on yet, oldest first."""
    answered: list[SavedGroup]
    """The admitted groups whose answers are there."""

    @property
    def extra(self) -> dict[str, Any]:
        """The state without the answers, as JSON values."""
        return {"next": self.next, "admitted": self.admitted}

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the checkpoint's files of answers, by file name."""
        lines = [_ANSWERED.dump_json(group, exclude_none=True).decode() + "\n" for group in self.answered]
        return {GROUPS: "".join(lines)} if lines else {}

    @classmethod
    def of_checkpoint(cls, path: Path) -> FeedState:
        """Read the state from the checkpoint at `path`. Raises `UserError` for a damaged line."""
        feed = read_about(path).extra.get("feed")
        values = feed | {"answered": []} if isinstance(feed, dict) else feed
        state = validated(_STATE.validate_python, values, f"{path}: feed", "Go on from an older checkpoint.")
        return dataclasses.replace(state, answered=read_answered(path / GROUPS))


_STATE, _ANSWERED = TypeAdapter(FeedState), TypeAdapter(SavedGroup)


def read_answered(path: Path) -> list[SavedGroup]:
    """Read the groups of a checkpoint; none if it has no file of groups. Raises `UserError` for a damaged line."""
    return whole_json_lines(path, "groups", _ANSWERED.validate_python) if path.is_file() else []
