"""The golden runs, and the digests of what a run has written."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.support.paths import EXAMPLES
from tests.support.tiny_model import TinyModel, write_tiny_model

KEPT = Path(__file__).with_name("kept")
"""One file for each kind of processor, as the bits of a sum depend on its instructions."""
SEEN_ON = "seen on"
"""The key of a file under which stand the models of processors that have had its digests."""
_TIMELY = ("perf/", "memory/")
_LATER = ("mismatch/bias", "mismatch/context_bias")
"""Metrics that came after the digests were kept."""
_REFERENCE = re.compile(rb', "reference": "(?:[^"\\]|\\.)*"(?=}\n)')
"""The reference of a rollout, which came later, too."""
_SHORT = ("run.steps=3", "eval.problems=16", "rollout.prompts_per_step=8", "tracking.wandb.mode=disabled")


@dataclass(frozen=True)
class Golden:
    """A short run. spec: a file of examples/. overrides: keys of it. model: a random one in place of the spec's."""

    name: str
    spec: str
    own: tuple[str, ...] = ()
    model: TinyModel | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """The keys that it sets, which decide its bits."""
        return (*_SHORT, *self.own)


DEMO = Golden("demo", "arithmetic.yaml", ("run.steps=6",))
"""The run of tests/e2e/test_cli_run.py has the same bits."""
RUNS = (
    DEMO,
    Golden(
        "deepseek", "arithmetic_deepseek.yaml",
        ("trainer.tp=2", "rollout.tp=2", "adapter={rank: 8, alpha: 16}",
         "rewards=[{function: length, kwargs: {free: 4}}]"),
        TinyModel(layers=4, hidden=256, heads=4, intermediate=256, experts=8, top_k=4, family="deepseek_v3", yarn=True),
    ),
    Golden("ppo", "arithmetic_ppo.yaml", ("rollout.engines=2", "rollout.staleness=1", "rollout.in_flight=false")),
    Golden("native", "arithmetic_native.yaml"),
)  # fmt: skip


def run(golden: Golden, folder: Path) -> Path:
    """Train a golden run below a folder; the run's directory. Raises CalledProcessError: it failed."""
    overrides = [*golden.overrides, f"run.name={golden.name}", f"run.dir={folder}"]
    if golden.model is not None:
        write_tiny_model(folder / "models" / golden.name, golden.model)
        overrides.append(f"model.path={folder / 'models' / golden.name}")
    command = [sys.executable, "-c", "from fp8rl.cli import main; main()", "train", EXAMPLES / golden.spec, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / golden.name


def kept() -> dict[str, Any]:
    """The digests of each run that are kept for this kind of processor, and SEEN_ON; empty where it is unknown."""
    path = KEPT / f"{processor()}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def digests(directory: Path) -> dict[str, str]:
    """Digest what a run has written, apart from what depends on the clock. In native mode that includes the metrics:
    the last bit of a log-probability depends on the requests that an engine computes together."""
    model = "model" if (directory / "model").is_dir() else "adapter"
    found = {
        "rollouts": _digest(sorted(directory.glob("rollouts/*.jsonl"))),
        "manifests": _digest(sorted(directory.glob("manifests/*.json"))),
        "model": _digest(sorted(directory.glob(f"{model}/*.safetensors"))),
    }
    if yaml.safe_load((directory / "spec.yaml").read_text())["numerics"]["mode"] == "exact":
        rows = [_timeless(json.loads(line)) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        found["metrics"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    return found


def processor() -> str:
    """Name the kind of processor, by what chooses the instructions of torch's and our sums: MKL's depend on the maker,
    too. One that may not use AVX-512 (.github/CONTRIBUTING.md) is of the kind that has none."""
    known, capability = _cpuinfo(), torch.backends.cpu.get_cpu_capability()
    flags = known["flags"].split() if capability == "AVX512" else []
    wide = [flag for flag in ("avx512_bf16", "amx_bf16", "amx_fp16") if flag in flags]
    return "-".join([known["vendor_id"], capability, *wide]).lower()


def processor_model() -> str:
    """Name the model of the processor. Models of one kind have had the same bits; that all of them do is not known."""
    known = _cpuinfo()
    return f"family {known['cpu family']}, model {known['model']}"


def _cpuinfo() -> dict[str, str]:
    """Read what Linux says of the last processor; all are alike."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(path.name.encode() + hashlib.sha256(_REFERENCE.sub(b"", path.read_bytes())).digest())
    return found.hexdigest()[:16]


def _timeless(row: dict[str, float]) -> dict[str, float]:
    """Leave the metrics that are a function of the spec, whatever the hour and the load."""
    return {
        name: value
        for name, value in sorted(row.items())
        if not name.startswith((*_TIMELY, *_LATER)) and "seconds" not in name and "bytes" not in name
    }
