"""docs/metrics.md, written from the registry: `python -m fp8rl.rl.record.reference`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp8rl.rl.record.metric import Metric
from fp8rl.rl.record.metric_rows import METRICS
from fp8rl.rl.record.metrics import FAMILIES

PAGE = Path("docs/metrics.md")
_HEAD = """\
# Metrics

Every number that a step writes into `metrics.jsonl`. This page is written from the registry (`rl/record/metrics.py`)
by `python -m fp8rl.rl.record.reference`; change it there.

d is the trainer's log-probability of a sampled token minus the engine's, and rho = e^d. `mismatch/` compares tokens
that the trainer's own weights have sampled, `drift/` trained tokens that older weights have sampled. Those of `train/`
and `critic/` are means over the step's updates. `p50` and `p99` are percentiles by nearest rank; exponents are clamped
to ±20.

*Over* is the denominator of a mean or a fraction. A metric that is *late* is known only after the step's decision:
gates judge it in the next step, and it can withhold no update. *Needs* is what a run must have; a gate on a metric that
the run does not measure is refused. With (…) a step may lack the metric although all goes as planned.
"""


def document() -> str:
    """The page: a table for each group of metrics."""
    groups: dict[str, list[tuple[str, Metric]]] = {}
    families = [(f"{stem}{{n}}", family.metric) for stem, family in FAMILIES.items()]
    for name, metric in (*METRICS.items(), *families):
        groups.setdefault(name.partition("/")[0], []).append((name, metric))
    return _HEAD + "".join(line for group, metrics in groups.items() for line in _table(group, metrics))


def _table(group: str, metrics: list[tuple[str, Metric]]) -> Iterator[str]:
    yield f"\n## {group}/\n\n| metric | unit | meaning | over | late | needs |\n|---|---|---|---|---|---|\n"
    for name, metric in metrics:
        needs = ", ".join(need.replace("_", " ") for need in metric.needs) + " (…)" * metric.at_times
        cells = [f"`{name.partition('/')[2]}`", metric.unit, metric.meaning, metric.over, "late" * metric.late, needs]
        yield "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(document())
