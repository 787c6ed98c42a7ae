"""A diagnosis as tables for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.doctor.judge import DataFound, Diagnosis, Remark
from fp8rl.diagnose.doctor.machine import Machine


def rendered(diagnosis: Diagnosis) -> RenderableType:
    """What is installed, what the GPUs can do, where both sides would run, the data, and what is in the way."""
    parts = [_installed(diagnosis.machine), _gpus(diagnosis), _sides(diagnosis), *map(_data, diagnosis.data)]
    problems = [_remark(remark) for remark in diagnosis.remarks]
    problems += [Text.assemble(("note      ", "bold"), note) for note in diagnosis.notes]
    verdict = "can run here" if diagnosis.ok else "cannot run here yet"
    if diagnosis.ok and not diagnosis.machine.probed:
        verdict += ", as far as was looked: no op has been tried (--quick)"
    style = "bold green" if diagnosis.ok else "bold red"
    lines = [line for part in parts if part is not None for line in (part, Text())]
    return Group(
        *lines, *problems, Text(f"spec {diagnosis.spec_digest}, {diagnosis.mode} mode: {verdict}", style=style)
    )


def _installed(machine: Machine) -> Table:
    table = Table("installed", "version", "this release is written for", box=None, pad_edge=False)
    table.add_row("python", f"{machine.python}, {machine.system}")
    cuda = f", built for CUDA {machine.torch_cuda}" if machine.torch_cuda else ", CPU build"
    for name, version in machine.libraries.items():
        if version is not None or name in machine.wanted:
            text = "" if version is None else version + (cuda if name == "torch" else "")
            table.add_row(name, text or Text("no", style="dim"), machine.wanted.get(name, "any"))
    for name in ("driver", "cublaslt", "cudnn", "nccl", "nvcc", "cc", "cxx"):
        if getattr(machine, name):
            table.add_row(name, getattr(machine, name), f"CUDA up to {machine.driver_cuda}" if name == "driver" else "")
    return table


def _gpus(diagnosis: Diagnosis) -> RenderableType:
    if not diagnosis.machine.gpus:
        return Text("no GPU")
    table = Table("GPU", "memory", "compute capability", "FP8", "128-blocks", "MX", box=None, pad_edge=False)
    for gpu, can in zip(diagnosis.machine.gpus, diagnosis.features, strict=True):
        capability = ".".join(map(str, gpu.capability))
        table.add_row(gpu.name, f"{gpu.memory / 2**30:.0f} GiB", capability, _yes(can.fp8), can.blocks, _yes(can.mx))
    return table


def _sides(diagnosis: Diagnosis) -> Table:
    table = Table("side", "precision", "device", "ops", "attention backend", box=None, pad_edge=False)
    for side in diagnosis.sides:
        table.add_row(side.name, side.precision, side.device, side.ops, side.attention)
    return table


def _data(data: DataFound) -> Text:
    """Return a source's first prompt as text, and what rewards give to its reference."""
    text = Text.assemble((data.key, "bold"), f"  {_count(data.problems, 'problem')} in {data.path}\n")
    text.append(f"the first prompt, {_count(data.prompt_tokens, 'token')}:\n")
    text.append("".join(f"  | {line}\n" for line in _shortened(data.prompt).splitlines()), style="dim")
    text.append(f"its reference: {_shortened(data.reference)}")
    for name, verdict in data.rewards.items():
        text.append(f"\nthe reward {name} gives to the reference as an answer: {verdict}")
    return text


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _shortened(text: str) -> str:
    left_out = len(text) - 2 * _ENDS
    return text if left_out <= 0 else f"{text[:_ENDS]} [... {left_out:,} characters ...] {text[-_ENDS:]}"


_ENDS = 1000
"""Characters of a longer text that are shown at its beginning and at its end."""


def _remark(remark: Remark) -> Text:
    text = Text("obstacle  " if remark.blocks else "warning   ", style="bold red" if remark.blocks else "bold yellow")
    text.append(f"{remark.key}: found {remark.found}, expected {remark.expected}. {remark.remedy}", style="not bold")
    return text


def _yes(value: bool) -> str:
    return "yes" if value else "no"
