"""Write the planner's tables into specs that have one: `python -m fp8rl.diagnose.plan.in_spec SPEC...`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from fp8rl.diagnose.plan import Plan, assumed, gpu_named, make_plan, read_subject
from fp8rl.rl.experiment.budget.memory import PHASES

_TITLE = "# The plan, `fp8rl plan SPEC --gpu {}`: GB on the fullest GPU in each phase of a step"


def with_table(path: Path) -> str:
    """The text of a spec with its table as the planner calculates it now, for the GPU that the table names."""
    lines = path.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    title = next(index for index, line in enumerate(lines[:first]) if re.fullmatch(_TITLE.format(r"\w+"), line))
    gpu = lines[title].partition("--gpu ")[2].partition("`")[0]
    subject = read_subject(str(path))
    plan = make_plan(subject, gpu_named(gpu), assumed(subject.experiment.numerics.mode))
    return "\n".join([*lines[:title], *_table(plan, gpu), *lines[first:]]) + "\n"


def _table(plan: Plan, gpu: str) -> list[str]:
    """Classes of bytes on the fullest GPU of the trainer, and of the engines where they have their own."""
    sides = ["colocated"] if plan.decides == "colocated" else ["trainer", "engine"]
    lines = [_TITLE.format(gpu)]
    for side in sides:
        memory = plan.memory[side]
        lines.append(f"# {'a GPU of an engine' if side == 'engine' else 'rank ' + str(memory.rank):<26}" + _row(PHASES))
        for name, held in memory.held.items():
            lines.append(f"#   {name:<24}" + _row([_gb(held.get(phase, 0.0)) for phase in PHASES]))
        lines.append(f"#   {'all':<24}" + _row([_gb(memory.in_phase(phase)) for phase in PHASES]))
    tokens = f"{plan.job.kv_tokens:,} tokens of KV cache in each engine"
    full = plan.gpu.memory - plan.slack
    lines.append(
        f"# {full / 1e9:.1f} of {plan.gpu.memory / 1e9:.1f} GB, {plan.slack / plan.gpu.memory:.1%} free; {tokens}"
    )
    return [line.rstrip() for line in lines]


def _row(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>9}" for cell in cells)


def _gb(value: float) -> str:
    return f"{value / 1e9:.2f}" if value else ""


if __name__ == "__main__":
    for spec in map(Path, sys.argv[1:]):
        spec.write_text(with_table(spec))
