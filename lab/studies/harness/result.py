"""`results.json` of a study: what its tables and figures are made from, what the claims came to, and where it comes
from."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fp8rl.numerics.core.reading import read_text
from lab.studies.harness.claims import Judged, digest, is_measured, judge
from lab.studies.harness.study import Measurement, Study

RESULTS = "results.json"
_NUMBERS = re.compile(r'\[\n[^\[\]{}"]*\]')
"""A list of numbers in indented JSON, which goes onto one line: an arm has a value for each of its sequences."""


@dataclass(frozen=True)
class Result:
    """A study that has run."""

    study: Study
    measurement: Measurement
    judged: Sequence[Judged]
    claims_digest: str
    """Of the claims as they were when it was measured."""
    quick: bool
    seeds: Sequence[int]
    seconds: float
    made: dict[str, Any]
    """Commit, versions, machine and date; see `provenance`."""
    specs: dict[str, str]
    """Quantization specs by name, their digests."""

    @property
    def claims_changed(self) -> bool:
        """True if the claims are others now than they were when it was measured."""
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
            "missing": list(self.measurement.missing),
            "specs": self.specs,
            "seconds": round(self.seconds, 1),
            "made": self.made,
        }
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"
        return _NUMBERS.sub(lambda numbers: json.dumps(json.loads(numbers[0])), text)

    def caption(self) -> str:
        """The text at the foot of a figure."""
        specs = ", ".join(f"{name} {value}" for name, value in self.specs.items())
        missing = self.measurement.missing
        length = "quick run: no verdicts" if self.quick else "not all arms: no verdicts" if missing else "full run"
        commit = (self.made["commit"] or "no commit")[:10] + ("+" if self.made["dirty"] else "")
        seeds = f"seeds {', '.join(map(str, self.seeds))}"
        measured = f"{self.study.name}, {length}, {commit} · {self.measurement.subject} · {seeds}"
        return measured + (f"\nspecs: {specs}" if specs else "")


def result_of(study: Study, data: dict[str, Any]) -> Result:
    """A result from the JSON of an earlier run, judged anew by the claims as they are now.

    Claims that came later, of arms that it did not have, wait for the next run; `claims_changed` is then true.
    """
    measurement = Measurement(data["values"], data["subject"], data["details"], data.get("missing", ()))
    claims = [claim for claim in study.claims if is_measured(claim, measurement.values)]
    return Result(
        study=study,
        measurement=measurement,
        judged=judge(claims, measurement.values, full=not data["quick"], missing=measurement.missing),
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


CODE = Path(__file__).resolve().parents[3]
"""The checkout of the code that measures, wherever it is called from."""
_WRITTEN_HERE = (":(top,exclude)lab/docs/studies", ":(top,exclude)lab/docs/studies.md")
"""What the studies before this one have written; no study reads it."""
PACKAGES = ("torch", "sglang", "megatron-core", "transformers", "numpy", "scipy")


def provenance() -> dict[str, Any]:
    """Commit, versions, machine and date of a measurement, as JSON values.

    `commit` is null outside a checkout; `dirty`: the checkout has changes that are not committed.
    """
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *_WRITTEN_HERE)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "cpu": processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def processor() -> str:
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=CODE, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
