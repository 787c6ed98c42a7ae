"""Tables that the code writes into files: the precision map into docs/exactness.md, the plan into specs that have one.

`python -m lab.written_tables docs/exactness.md examples/NAME.yaml ...` makes them anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from fp8rl.diagnose.plan import Plan, make_plan
from fp8rl.diagnose.plan.subject import read_plan_subject
from fp8rl.numerics.precision_map import CLASSES
from fp8rl.rl.experiment.budget.job import gpu_named
from fp8rl.rl.experiment.budget.memory import PHASES

PAGE = "docs/exactness.md"
BEGIN, END = f"<!-- table: python -m lab.written_tables {PAGE} -->", "<!-- end of table -->"
_SPEC = {
    "activation": "`activation`",
    "weight": "`weight`",
    "gradient": "`gradient`",
    "served": "`weight`",
    "wire": "`gradient_wire`",
    "gather": "`weight_gather`",
    "kv": "`kv`",
    "operand": "a format that holds it",
    "dequantized": "a format that holds it",
}
"""Words for a key of a spec: the key of the numerics or the trainer section, or the narrowest format that is exact."""
_TITLE = "# The plan, `fp8rl plan SPEC --gpu {}`: GB on the fullest GPU in each phase of a step"


def with_precision_map(text: str) -> str:
    """Make the table of docs/exactness.md anew, a line per class of tensors; `text` is that of the page."""
    lines = ["| tensors | exact | native | published | why |", "|---|---|---|---|---|"]
    last = ""
    for each in CLASSES:
        if each.row != last:
            lines.append(f"| **{each.row}** | | | | |")
        last = each.row
        exact, native = _formats(each.exact), _formats(each.native)
        name = f"{each.tensors} (`{each.key}`)"
        lines.append(f"| {name} | {exact} | {native} | {_formats(each.document)} | {each.why} |")
    before, _, rest = text.partition(BEGIN)
    table = "\n".join(lines)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def _formats(formats: str) -> str:
    said = [form if form.startswith("{") else form.upper() for form in formats.split("|")]
    return " or ".join(said).format(**_SPEC)


def plan_of(spec: str, *, gpu: str) -> Plan:
    return make_plan(read_plan_subject(spec), gpu_named(gpu))


def with_plan(path: Path, planned: Callable[..., Plan] = plan_of) -> str:
    """Make the table of a spec anew, as the planner calculates it now for the GPU that the table names."""
    lines = path.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    title = next(index for index, line in enumerate(lines[:first]) if re.fullmatch(_TITLE.format(r"\w+"), line))
    gpu = lines[title].partition("--gpu ")[2].partition("`")[0]
    return "\n".join([*lines[:title], *_plan_table(planned(str(path), gpu=gpu), gpu), *lines[first:]]) + "\n"


def _plan_table(plan: Plan, gpu: str) -> list[str]:
    """List the classes of bytes on the fullest GPU of the trainer, and of the engines where they have their own."""

    def row(cells: Iterable[str]) -> str:
        return "".join(f"{cell:>9}" for cell in cells)

    def gb(value: float) -> str:
        return f"{value / 1e9:.2f}" if value else ""

    lines = [_TITLE.format(gpu)]
    for side in ["colocated"] if plan.decides == "colocated" else ["trainer", "engine"]:
        memory = plan.memory[side]
        lines.append(f"# {'a GPU of an engine' if side == 'engine' else 'rank ' + str(memory.rank):<26}" + row(PHASES))
        for name, held in memory.held.items():
            lines.append(f"#   {name:<24}" + row(gb(held.get(phase, 0.0)) for phase in PHASES))
        lines.append(f"#   {'all':<24}" + row(gb(memory.in_phase(phase)) for phase in PHASES))
    full, has = plan.gpu.memory - plan.slack, plan.gpu.memory
    free = f"{full / 1e9:.1f} of {has / 1e9:.1f} GB, {plan.slack / has:.1%} free"
    lines.append(f"# {free}; {plan.job.kv_tokens:,} tokens of KV cache in each engine")
    return [line.rstrip() for line in lines]


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(with_precision_map(file.read_text()) if file.suffix == ".md" else with_plan(file))
