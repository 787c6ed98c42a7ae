"""rollouts/step_N.jsonl: every trajectory of a step, with all that it takes to compute the step again.

rollouts/ahead_N.jsonl: answers for later steps on which trainer and engine were compared in step N.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, TypeAdapter

from fp8rl.numerics.core.files import write_atomically
from fp8rl.numerics.core.reading import BadLine, json_lines

SHOWN = 8
"""How many trajectories of a step are shown to people."""
LogProb = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A log-probability. One that is not finite is null in a file, and NaN when it is read."""


@dataclasses.dataclass(frozen=True)
class RolloutRecord:
    """A trajectory of a step, with the log-probabilities of both sides."""

    prompt: str
    """The text of the question."""
    text: str
    """The text of the answer."""
    reward: float
    """The reward of the answer."""
    abs_diff_mean: float | None
    """The mean abs(d) over the answer's tokens; None if none is finite."""
    group: int
    """The number of the prompt in the step."""
    seed: int
    """The seed of the tokens' draws."""
    finished: bool
    """The model ended the answer itself."""
    prompt_ids: list[int]
    """[P], the tokens of the prompt."""
    token_ids: list[int]
    """[T], the tokens of the answer, including an environment's tokens."""
    rollout_logprobs: list[LogProb]
    """The engine's log-probabilities of the model's tokens; NaN if not finite."""
    train_logprobs: list[LogProb]
    """The trainer's log-probabilities of the model's tokens; NaN if not finite."""
    weight_versions: list[int]
    """The weight versions that sampled the model's tokens."""
    advantage: float | None
    """The advantage of the answer's first token; None if not finite."""
    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    """The value of each reward function."""
    told: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Spans of `token_ids` that an environment wrote."""
    said: list[tuple[Literal["model", "environment"], str]] = dataclasses.field(default_factory=list)
    """The turns as (speaker, text), if an environment wrote any."""
    outcome: dict[str, float] = dataclasses.field(default_factory=dict)
    """The numbers that the environment returned."""
    teacher_logprobs: list[float] | None = None
    """[T], the teacher's log-probabilities; None without a teacher."""
    supports: list[list[int]] | None = None
    """The ids that each of the model's tokens was drawn from under top-p, top-k or min-p; None if the trainer's own
    logits give them."""
    reference: str | None = None
    """The reference answer, on the first trajectory of each prompt."""


@dataclasses.dataclass(frozen=True)
class ScoredRecord:
    """An answer for a later step that the trainer scored in this step, to compare its scores with the engine's."""

    token_ids: list[int]
    """[S], the tokens of prompt and answer."""
    sampled: list[int]
    """Positions of the tokens that the model sampled. The other fields have an entry for each of these tokens."""
    rollout_logprobs: list[LogProb]
    train_logprobs: list[LogProb]
    weight_versions: list[int]


def write_rollouts(path: Path, records: Iterable[RolloutRecord] | Iterable[ScoredRecord]) -> None:
    """Write one JSON object per line, in the order of the batch; a number that is not finite is null."""
    write_atomically(path, "".join(_line(record) for record in records))


def rollouts_found(path: Path) -> tuple[list[RolloutRecord], list[BadLine]]:
    """Read the records of a file that may be damaged, and the lines that are no records."""
    return json_lines(path, "rollouts", ROLLOUT.validate_python)


def shown(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """Return the first trajectory of each of the first groups."""
    firsts = {record.group: record for record in reversed(records)}
    return [firsts[group] for group in sorted(firsts)[:SHOWN]]


def _line(record: RolloutRecord | ScoredRecord) -> str:
    values = dict(vars(record))  # `asdict` would copy every token
    for name in ("supports", "reference"):
        if values.get(name, ()) is None:
            del values[name]  # older files have no such key
    if not math.isfinite(values.get("advantage") or 0.0):  # of an algorithm whose loss is not finite
        values["advantage"] = None
    for name in ("rollout_logprobs", "train_logprobs"):
        values[name] = [x if math.isfinite(x) else None for x in values[name]]
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


ROLLOUT = TypeAdapter(RolloutRecord)
