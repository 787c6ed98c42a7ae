"""Runs of the command itself, as users start them, and the rows of metrics that they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def trained(spec: Path, folder: Path, name: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The metrics of a run of `spec`, which is left in `folder`: a row for each step, the first of them before it.

    Raises:
        RuntimeError: it failed.
    """
    command = [str(Path(sys.executable).with_name("fp8rl")), "train", str(spec)]
    own = {"run.dir": folder, "run.name": name, "tracking.wandb.mode": "disabled"}
    command += [f"{key}={value}" for key, value in (own | dict(settings)).items()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            errors = run.communicate()[1]
        except KeyboardInterrupt:
            run.terminate()
            run.communicate()  # until it has ended its engine
            raise
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}: {errors[-2000:]}")
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
