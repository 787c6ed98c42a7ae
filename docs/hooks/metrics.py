"""Prints docs/metrics.md, from the registry of metrics."""

from __future__ import annotations

import dataclasses

from fp8rl.rl.record.metrics import FAMILIES, METRICS

_HEAD = """\
# Metrics

This page has every number that a step writes into `metrics.jsonl`. `make pages` writes it from the registry
(`fp8rl/rl/record/metrics.md`); change it there.

d is the trainer's log-probability of a sampled token minus the engine's, and rho = e^d. `mismatch/` compares tokens
that the trainer's current weights have sampled. `drift/` compares trained tokens that older weights have sampled.
`train/` and `critic/` metrics are means over the step's updates. `p50` and `p99` are percentiles by nearest rank.
Exponents are clamped to ±20.

- *Over* is the denominator of a mean or a fraction.
- *Late*: the metric is measured after the decision whether to update. Gates judge it in the next step, so it cannot
  withhold an update.
- *Needs*: what a run must have to measure the metric. A gate on a metric that the run does not measure is refused.
- (…): a step may lack the metric although nothing is wrong.
"""


_STATISTICS = ("mean", "p50", "p99", "max")
"""Ends of the names of metrics that are statistics of one quantity."""


def page() -> str:
    """Return the page: a table for each group of metrics. The four statistics of one quantity are one row."""
    groups: dict[str, list[str]] = {}
    for name, metric in (*METRICS.items(), *((name, family.metric) for name, family in FAMILIES.items())):
        group, _, rest = name.partition("/")
        stem, _, end = rest.rpartition("_")
        if all(f"{group}/{stem}_{each}" in METRICS for each in _STATISTICS):
            if end != "mean":
                continue
            rest = "`, `".join(f"{stem}_{each}" for each in _STATISTICS)
            meaning = metric.meaning.replace("Mean of", "Mean, median, 99th percentile and maximum of", 1)
            metric = dataclasses.replace(metric, meaning=meaning)
        needs = ", ".join(need.replace("_", " ") for need in metric.needs) + " (…)" * metric.at_times
        cells = [f"`{rest}`", metric.unit, metric.meaning, metric.over, "late" * metric.late, needs]
        line = "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |\n"
        groups.setdefault(group, []).append(line)
    head = "| metric | unit | meaning | over | late | needs |\n|---|---|---|---|---|---|\n"
    return _HEAD + "".join(f"\n## {group}/\n\n{head}{''.join(lines)}" for group, lines in groups.items())


if __name__ == "__main__":
    print(page(), end="")
