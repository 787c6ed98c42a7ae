"""The doctor's report: what is installed, what the GPUs can do, where both sides run, and what prevents a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import RenderableType
from rich.text import Text

from fp8rl.diagnose.doctor.formats import map_table
from fp8rl.diagnose.doctor.machine import Machine
from fp8rl.diagnose.report import Finding, Report, grid
from fp8rl.rl.report.summary import counted

if TYPE_CHECKING:
    from fp8rl.diagnose.doctor.pair import Pair  # what it imports may not be installed

Blocks = Literal["native", "by MX", "no"]
ENDS = 1000
"""Of a longer text, this many first and last characters are shown."""
_OPENED = re.compile(r"(?:<\|?/?[\w:]*think\w*\|?>|\[/?think\])\s*$", re.IGNORECASE)
"""A tag that opens the model's thoughts at the end of a prompt."""


@dataclass(frozen=True)
class Side:
    """One side of a run: trainer or engine."""

    name: str
    precision: str
    """Precision of the side's products."""
    device: str
    """cpu or cuda."""
    ops: str
    """The implementation that computes the side's ops."""
    attention: str = ""
    """The engine's attention backend."""


@dataclass(frozen=True)
class Features:
    """The formats that a GPU multiplies natively."""

    fp8: bool
    blocks: Blocks
    """Products with 128 x 128 and 1 x 128 scales."""
    mx: bool


@dataclass(frozen=True)
class DataFound:
    """A source of problems, and its first problem."""

    key: str
    """The source's key in the spec."""
    path: str
    problems: int
    prompt: str
    """The text that the model is given."""
    prompt_tokens: int
    reference: str
    """The reference answer in the data."""
    rewards: Mapping[str, str]
    """By name, each function's reward if the model answers with the reference, or why it is not known."""


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found: the machine, where both sides run, the errors and notes of a start, and the data."""

    machine: Machine
    mode: str
    spec_digest: str
    sides: tuple[Side, Side]
    features: tuple[Features, ...]
    findings: tuple[Finding, ...]
    data: tuple[DataFound, ...] = ()
    pair: Pair | None = None
    """The comparison of both sides; None: they were not started."""


def reported(diagnosis: Diagnosis, subject: str = "") -> Report:
    """Make the report: the machine's tables, the findings, and the verdict. subject: the spec."""
    machine = diagnosis.machine
    sides = [(side.name, side.precision, side.device, side.ops, side.attention) for side in diagnosis.sides]
    tables: list[RenderableType] = [
        _installed(machine),
        _gpus(diagnosis) if machine.gpus else Text("no GPU"),
        grid(("side", "precision", "device", "ops", "attention backend"), sides),
        *map(_data, diagnosis.data),
    ]
    facts, findings = {**vars(diagnosis)}, diagnosis.findings
    del facts["findings"], facts["pair"]
    verdict = "can run here" if all(each.grade != "error" for each in findings) else "cannot run here yet"
    if verdict == "can run here" and not machine.probed:
        verdict += ", as far as checked; the ops were not tested, and the sides not started (--quick)"
    if (pair := diagnosis.pair) is not None:
        facts |= {name: value for name, value in vars(pair).items() if name != "findings"}
        findings = (*findings, *pair.findings)
        wrong = {each.key for each in pair.findings if each.grade == "error"}
        tables += [map_table(pair.rows, wrong)] if pair.rows else []
        verdict += f"; {pair.verdict}"
    said = f"spec {diagnosis.spec_digest}, {diagnosis.mode} mode: {verdict}"
    return Report("doctor", subject, findings, facts, tables=tuple(tables), verdict=said)


def _installed(machine: Machine) -> RenderableType:
    rows: list[tuple[RenderableType, ...]] = [("python", f"{machine.python}, {machine.system}", "")]
    cuda = f", built for CUDA {machine.torch_cuda}" if machine.torch_cuda else ", CPU build"
    for name, version in machine.libraries.items():
        if version is not None or name in machine.wanted:
            text = "" if version is None else version + (cuda if name == "torch" else "")
            rows.append((name, text or Text("no", style="dim"), machine.wanted.get(name, "any")))
    for name in ("driver", "nvcc", "cc", "cxx"):
        if value := getattr(machine, name):
            rows.append((name, value, f"CUDA up to {machine.driver_cuda}" if name == "driver" else ""))
    return grid(("installed", "version", "this release is written for"), rows)


def _gpus(diagnosis: Diagnosis) -> RenderableType:
    rows = []
    for gpu, can in zip(diagnosis.machine.gpus, diagnosis.features, strict=True):
        fp8, mx = ("yes" if each else "no" for each in (can.fp8, can.mx))
        capability = ".".join(map(str, gpu.capability))
        rows.append((gpu.name, f"{gpu.memory / 2**30:.0f} GiB", capability, fp8, can.blocks, mx))
    return grid(("GPU", "memory", "compute capability", "FP8", "128-blocks", "MX"), rows)


def _data(data: DataFound) -> Text:
    """Render a source's first prompt, and the rewards of its reference."""
    problems, tokens = counted(data.problems, "problem"), counted(data.prompt_tokens, "token")
    text = Text.assemble((data.key, "bold"), f"  {problems} in {data.path}\n")
    text.append(f"the first prompt, {tokens}:\n")
    text.append("".join(f"  | {line}\n" for line in _shortened(data.prompt).splitlines()), style="dim")
    if opened := _OPENED.search(data.prompt):
        text.append(f"it ends in {opened[0]!r}: the answer, which the reward `format` reads, begins after that\n")
    text.append(f"its reference: {_shortened(data.reference)}")
    for name, reward in data.rewards.items():
        text.append(f"\nreward of the reference as an answer ({name}): {reward}")
    return text


def _shortened(text: str) -> str:
    left_out = len(text) - 2 * ENDS
    return text if left_out <= 0 else f"{text[:ENDS]} [... {left_out:,} characters ...] {text[-ENDS:]}"
