"""The teacher: a second model, on engines of its own, that scores the tokens that the policy has sampled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fp8rl.models import read_model
from fp8rl.models.architecture import Role
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.cluster.reservations import Reservations
from fp8rl.rl.run.engines.engines import Engines
from fp8rl.rl.run.engines.serving import Serving, engine_maker
from fp8rl.rl.run.events import Events
from fp8rl.rollout.types import EngineError, Trajectory
from fp8rl.weight_sync.manifest import Manifest, Recorder
from fp8rl.weight_sync.served import convert_checkpoint

_ROLE: Role = "teacher"
_VERSION = 0


@dataclass(frozen=True)
class Teacher:
    """The teacher of a run. Token ids go in, log-probabilities come out; its weights are never synced.

    Each of its engines starts from the quantized copy of `teacher.path` that the run makes, and scores nothing until
    its digests equal the copy's digests. A lost engine is replaced, as the policy's engines are.
    """

    engines: Engines

    @classmethod
    def start(cls, experiment: Experiment, reservations: Reservations, folder: Path, events: Events) -> Self | None:
        """Begin to start the teacher's engines; `engines.wait()` waits for them. None without a `teacher` section.

        folder: for their logs, and the checkpoint that they start from.
        """
        section = experiment.teacher
        if section is None:
            return None
        numerics = section.numerics(experiment.numerics, experiment.numerics_config().k_splits)
        source, checkpoint, spec = section.directory, folder / "served" / "teacher", numerics.rollout_spec
        recorder = Recorder(read_model(source).tensors, section.tp)
        convert_checkpoint(source, checkpoint, spec, recorder)
        manifest = Manifest.merged(_VERSION, spec, [recorder.sent()], _ROLE)
        make = engine_maker(experiment, _ROLE, reservations, folder, numerics)
        serving = Serving(make, checkpoint, _VERSION, manifest, _ROLE)
        return cls(Engines(section.engines, serving, section.engine(experiment.rollout), events))

    async def logprobs(self, answers: Sequence[Trajectory]) -> list[list[float]]:
        """Ask for the teacher's log-probability, at temperature 1, of each token of each answer.

        Raises EngineError: engines were lost too often, or a value is not finite.
        """
        sequences = [answer.prompt_ids + answer.token_ids for answer in answers]
        scores = await asyncio.wrap_future(self.engines.score(sequences))
        found = [score[len(answer.prompt_ids) - 1 :] for answer, score in zip(answers, scores, strict=True)]
        bad = sum(not math.isfinite(value) for values in found for value in values)
        if bad:
            raise EngineError(
                f"found {bad} log-probabilities of the teacher that are not finite, expected numbers. Check the "
                "weights of teacher.path"
            )
        return found
