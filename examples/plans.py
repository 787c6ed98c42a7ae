"""Write the planner's tables into the specs for real models: `python -m examples.plans`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from diagnose.plan import Plan, assumed, gpu_named, make_plan, read_subject
from rl.experiment.budget.memory import PHASES

FOR = {"qwen3_4b_one_gpu": "h100", "qwen3_30b_a3b": "h200", "qwen3_235b_a22b": "h200"}
"""The specs, and the GPU that each is written for."""
_FOLDER = Path(__file__).parent
_TITLE = "# The plan, "


def with_table(name: str) -> str:
    """The text of a spec with its table as the planner calculates it now, above the first key."""
    path, gpu = _FOLDER / f"{name}.yaml", gpu_named(FOR[name])
    subject = read_subject(str(path))
    plan = make_plan(subject, gpu, assumed(subject.experiment.numerics.mode))
    lines = path.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    head = lines[: next((index for index in range(first) if lines[index].startswith(_TITLE)), first)]
    return "\n".join([*head, *_table(plan, FOR[name]), *lines[first:]]) + "\n"


def _table(plan: Plan, gpu: str) -> list[str]:
    """Classes of bytes on the fullest GPU of the trainer, and of the engines where they have their own."""
    sides = ["colocated"] if plan.decides == "colocated" else ["trainer", "engine"]
    lines = [f"{_TITLE}`fp8rl plan SPEC --gpu {gpu}`: GB on the fullest GPU in each phase of a step"]
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
    for each in FOR:
        text = with_table(each)
        (_FOLDER / f"{each}.yaml").write_text(text)
