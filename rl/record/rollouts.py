"""rollouts/step_N.jsonl: every trajectory of a step with all that it takes to compute the step again.

rollouts/ahead_N.jsonl: answers to later steps that the step was compared on too.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from fp8rl.numerics.core.files import write_atomically
from fp8rl.numerics.core.reading import BadLine, json_lines

SHOWN = 8
"""Trajectories of a step that a person is shown."""


@dataclasses.dataclass(frozen=True)
class RolloutRecord:
    """A trajectory.

    prompt, text: of the question and of the answer. reward: of the answer. abs_diff_mean: mean abs(d) over its tokens,
    None if none is finite. group: number of its prompt in the step. seed: of its draws. finished: the model ended the
    answer itself.
    prompt_ids: [P]. token_ids: [T], what follows. told: spans of it that an environment wrote.
    rollout_logprobs, train_logprobs, weight_versions: of the other tokens; a log-probability that is not finite is NaN.
    advantage: of its first token, None before training. reward_parts: what each function said. said: (model or
    environment, text) by turn, where there was an environment that said something. outcome: what it returned.
    teacher_logprobs: [T]; None without a teacher. supports: of the other tokens, the ids that each was drawn from under
    top-p, top-k or min-p; None where these are found in the trainer's own logits.
    """

    prompt: str
    text: str
    reward: float
    abs_diff_mean: float | None
    group: int
    seed: int
    finished: bool
    prompt_ids: list[int]
    token_ids: list[int]
    rollout_logprobs: list[float]
    train_logprobs: list[float]
    weight_versions: list[int]
    advantage: float | None
    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    told: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    said: list[tuple[Literal["model", "environment"], str]] = dataclasses.field(default_factory=list)
    outcome: dict[str, float] = dataclasses.field(default_factory=dict)
    teacher_logprobs: list[float] | None = None
    supports: list[list[int]] | None = None


@dataclasses.dataclass(frozen=True)
class ScoredRecord:
    """An answer to a later step, as the trainer scored it: of what a step is compared on, beside its own answers.

    token_ids: [S], the prompt's included. sampled: the positions of those that the model sampled. The others are of
    these tokens; a log-probability that is not finite is NaN.
    """

    token_ids: list[int]
    sampled: list[int]
    rollout_logprobs: list[float]
    train_logprobs: list[float]
    weight_versions: list[int]


def write_rollouts(path: Path, records: Iterable[RolloutRecord] | Iterable[ScoredRecord]) -> None:
    """Write one JSON object per line, in the order of the batch; a number that is not finite is null."""
    write_atomically(path, "".join(_line(record) for record in records))


def rollouts_found(path: Path) -> tuple[list[RolloutRecord], list[BadLine]]:
    """The records of a file that may be damaged, and the lines that are none."""
    return json_lines(path, "rollouts", parse_rollout)


def shown(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """The first trajectory of each of the first groups."""
    firsts = {record.group: record for record in reversed(records)}
    return [firsts[group] for group in sorted(firsts)[:SHOWN]]


def _line(record: RolloutRecord | ScoredRecord) -> str:
    values = dict(vars(record))  # `asdict` would copy every token
    if values.get("supports", ()) is None:
        del values["supports"]  # as files were before there were any
    for name in ("rollout_logprobs", "train_logprobs"):
        values[name] = [x if math.isfinite(x) else None for x in values[name]]
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


_RECORD = TypeAdapter(RolloutRecord)


def parse_rollout(values: dict[str, Any]) -> RolloutRecord:
    """The trajectory of a line's object, for `numerics.core.reading.json_lines`."""
    for name in ("rollout_logprobs", "train_logprobs"):
        values[name] = [math.nan if x is None else x for x in values[name]]
    return _RECORD.validate_python(values)
