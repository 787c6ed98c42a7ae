"""`results.json` of a study: everything that its tables and figures are made from, and what the claims came to."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl.numerics.core.reading import read_text
from lab.studies.harness.claims import Judged, digest, is_measured, judge
from lab.studies.harness.study import Measurement, Study

RESULTS = "results.json"
_NUMBERS = re.compile(r'\[\n[^\[\]{}"]*\]')
"""A list of numbers in indented JSON, which goes onto one line: an arm has a value for each of its sequences."""


@dataclass(frozen=True)
class Result:
    """A study that has run.

    Attributes:
        claims_digest: of the claims as they were when it was measured.
        seeds: of its measurements.
        made: commit, versions, machine and date; see `provenance`.
        specs: quantization specs by name, their digests.
    """

    study: Study
    measurement: Measurement
    judged: Sequence[Judged]
    claims_digest: str
    quick: bool
    seeds: Sequence[int]
    seconds: float
    made: dict[str, Any]
    specs: dict[str, str]

    @property
    def claims_changed(self) -> bool:
        """Whether the claims are others now than they were when it was measured."""
        return self.claims_digest != digest(self.study.claims)

    @property
    def broken_controls(self) -> list[str]:
        """Names of the controls that do not hold."""
        controls = [one for one in self.judged if one.claim.control]
        return [one.claim.id for one in controls if one.verdict != "confirmed" and not one.why]

    def to_json(self) -> str:
        """Numbers that are not finite are refused: a study says what became of them."""
        data = {
            "study": self.study.name,
            "question": self.study.question,
            "quick": self.quick,
            "seeds": list(self.seeds),
            "subject": self.measurement.subject,
            "claims_digest": self.claims_digest,
            "claims": [judged.to_dict() for judged in self.judged],
            "values": self.measurement.values,
            "details": self.measurement.details,
            "specs": self.specs,
            "seconds": round(self.seconds, 1),
            "made": self.made,
        }
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"
        return _NUMBERS.sub(lambda numbers: json.dumps(json.loads(numbers[0])), text)

    def caption(self) -> str:
        """What a figure says at its foot."""
        specs = ", ".join(f"{name} {value}" for name, value in self.specs.items())
        length = "quick run: no verdicts" if self.quick else "full run"
        commit = (self.made["commit"] or "no commit")[:10] + ("+" if self.made["dirty"] else "")
        seeds = f"seeds {', '.join(map(str, self.seeds))}"
        measured = f"{self.study.name}, {length}, {commit} · {self.measurement.subject} · {seeds}"
        return measured + (f"\nspecs: {specs}" if specs else "")


def result_of(study: Study, data: dict[str, Any]) -> Result:
    """A result from the JSON of an earlier run, judged anew by the claims as they are now.

    Claims that came later, of arms that it did not have, wait for the next run; `claims_changed` is then true.
    """
    measurement = Measurement(data["values"], data["subject"], data["details"])
    claims = [claim for claim in study.claims if is_measured(claim, measurement.values)]
    return Result(
        study=study,
        measurement=measurement,
        judged=judge(claims, measurement.values, full=not data["quick"]),
        claims_digest=data["claims_digest"],
        quick=data["quick"],
        seeds=data["seeds"],
        seconds=data["seconds"],
        made=data["made"],
        specs=data["specs"],
    )


def read_result(path: Path) -> dict[str, Any]:
    """The JSON of a run."""
    data: dict[str, Any] = json.loads(read_text(path, "study", "a study's results.json"))
    return data
