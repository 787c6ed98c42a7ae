"""Every metric of a run. Gates, reports, the reference page, wandb and the tests of real runs read this registry.

It is the table `metrics.md` beside this file, one metric a line. A name is `group/name`. Groups: `rollout/` sampling
and rewards, `train/` the policy's updates, `critic/` the critic's updates, `mismatch/` trainer against engine on tokens
that the trainer's present weights have sampled, `drift/` the same on trained tokens that older weights have sampled,
`gates/` gates that fired, `sync/` weight synchronisation, `perf/` time, `memory/` bytes that move when trainer and
engines take turns, `eval/` held-out problems, `tracking/` the log. A metric is of one step unless it says otherwise;
`train/` and `critic/` are means over its updates. d is trainer minus rollout logprob of a sampled token, rho = e^d.
`p50` and `p99` are percentiles by nearest rank. Exponents are clamped to ±20.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from fp8rl.rl.mismatch import OLDEST, POSITION_STARTS

REWARD_PARTS = "rollout/reward/"
"""Prefix of the metrics that are named after reward functions."""
OUTCOMES = "rollout/outcome/"
"""Prefix of the metrics whose names an environment gives."""


def held_out_is(*rows: Mapping[str, float]) -> str:
    """Return the word for `eval/accuracy` in these rows: `accuracy` if all rewards are 0 or 1, else `reward`."""
    graded = any("eval/graded" in row or not 0.0 <= row.get("eval/accuracy", 0.0) <= 1.0 for row in rows)
    return "reward" if graded else "accuracy"


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric, without its name."""

    unit: str
    """Empty for a plain ratio."""
    meaning: str
    """One sentence."""
    over: str = ""
    """The denominator of a mean or a fraction: a metric's name, or words. Empty: there is none."""
    late: bool = False
    """The metric is known only after the step's decision. Gates judge it in the next step, and it withholds nothing."""
    needs: tuple[str, ...] = ()
    """Conditions that a run must meet; `rl.experiment.gate_rules` has them."""
    at_times: bool = False
    """A step may lack the metric although the run measures it and nothing is wrong."""
    flat_at_first: bool = False
    """The metric has the same value in the first pass of every batch that gets several updates."""
    chart: tuple[str, str] | None = None
    """Title of the chart in the report that shows the metric, and the name of its curve."""
    summary: str = ""
    """`max`, `min` or `last`: the value that stands for the run in wandb's summary, if it is not the last row's."""
    shown_as: str = ""
    """The short name of a metric that is shown first: on the console, in wandb and where runs are compared."""

    def named(self, fields: Mapping[str, str]) -> Metric:
        """Return the member of a family whose name has these fields."""
        chart = self.chart and (self.chart[0], self.chart[1].format(**fields))
        return replace(self, meaning=self.meaning.format(**fields), over=self.over.format(**fields), chart=chart)


@dataclass(frozen=True)
class Family:
    """Metrics whose names differ in a field: a number `{n}`, or a name that a spec gives, `{part}` or `{set}`."""

    metric: Metric
    """The declaration; its texts have the fields of the name."""
    pattern: re.Pattern[str]
    """The pattern of the members' names; its groups are the fields."""
    numbers: Sequence[int]
    """The values that `{n}` can have."""


def _read() -> tuple[dict[str, Metric], dict[str, Family]]:
    """Read the table: the metrics with fixed names, and the families by their names with fields."""
    fixed, families = {}, {}
    starts = ", ".join(map(str, POSITION_STARTS))
    text = resources.files("fp8rl.rl.record").joinpath("metrics.md").read_text(encoding="utf-8")
    for line in text.partition("|---|\n")[2].splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        name, unit, marks, needs, over, chart, summary, meaning = cells
        title, _, curve = chart.partition(": ")
        metric = Metric(
            unit,
            meaning.replace("{oldest}", str(OLDEST)).replace("{starts}", starts),
            over,
            late="late" in marks,
            needs=tuple(needs.split(", ")) if needs else (),
            at_times="at times" in marks,
            flat_at_first="level at first" in marks,
            chart=(title, curve) if chart else None,
            summary=summary,
            shown_as=marks.partition("shown as ")[2],
        )
        if "{" in name:
            pattern = name.replace("{n}", r"(?P<n>0|[1-9]\d*)").replace("{set}", "(?P<set>[^/]+)")
            families[name] = Family(metric, re.compile(pattern.replace("{part}", "(?P<part>.*)")), _numbers(name))
        else:
            fixed[name] = metric
    return fixed, families


def _numbers(name: str) -> Sequence[int]:
    if name.endswith("_age_{n}"):
        return range(0 if name.startswith("rollout/") else 1, OLDEST + 1)  # nothing drifts at age 0
    return POSITION_STARTS if name.endswith("_pos_{n}") else range(1 if "@" in name else 0, 1 << 16)


METRICS, FAMILIES = _read()
SHOWN_FIRST = {name: row.shown_as for name, row in METRICS.items() if row.shown_as}


@cache
def describe(name: str) -> Metric | None:
    """Return the metric of this name, fixed or of a family; None if no run has such a metric."""
    if name in METRICS:
        return METRICS[name]
    for family in FAMILIES.values():
        match = family.pattern.fullmatch(name)
        if match and int(match.groupdict().get("n", family.numbers[0])) in family.numbers:
            return family.metric.named(match.groupdict())
    return None


def is_fixed(name: str) -> bool:
    """Return whether the metric's name is fixed: no reward, environment or evaluation set of a spec names it."""
    return name in METRICS or (describe(name) is not None and not name.startswith((REWARD_PARTS, OUTCOMES, "eval/")))


def nearest_metric(name: str) -> str:
    """Return the metric whose name is most like `name`; for a family with numbers, the first such member."""
    numbered = {form: family for form, family in FAMILIES.items() if "{n}" in form and "{set}" not in form}
    members = [form.format(n=number) for form, family in numbered.items() for number in family.numbers[:16]]
    (nearest,) = difflib.get_close_matches(name, [*METRICS, *members], n=1, cutoff=0.0)
    return nearest


def metric(name: str) -> Metric:
    """Return the declared metric, or a blank one for a name outside the tables."""
    return describe(name) or Metric("", "")
