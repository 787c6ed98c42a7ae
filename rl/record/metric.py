"""What is known of a metric beside its name: a row of the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Literal

Feature = Literal[
    "engines",
    "canary",
    "samples",
    "evaluation",
    "environment",
    "staleness",
    "several_engines",
    "sleep",
    "speculation",
    "routes",
    "redraws",
    "weights",
    "merged",
    "cap",
    "rejection",
    "reference",
    "teacher",
    "critic",
]
"""What a run may have, without which some metrics do not exist; `rl.experiment.features` says when."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """One number of a step.

    Attributes:
        unit: empty for a plain ratio.
        meaning: one sentence.
        over: the denominator of a mean or a fraction, a metric or in words; empty where there is none.
        late: it is known only after the step's decision. Gates judge it in the next step, and it may withhold nothing.
        needs: what a run must have.
        at_times: a step of such a run may lack it although all goes as planned.
        flat_at_first: it is the same in the first pass of every batch that gets several updates.
        chart: title of the report's chart that draws it, and the name of its curve there.
    """

    unit: str
    meaning: str
    over: str = ""
    late: bool = False
    needs: tuple[Feature, ...] = ()
    at_times: bool = False
    flat_at_first: bool = False
    chart: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """Metrics that differ by a number at the end of their name; `{n}` stands for it in the meaning and the curve.

    numbers: that members can have.
    """

    metric: Metric
    numbers: Collection[int]

    def member(self, number: int) -> Metric:
        """The metric with this number."""
        return named(self.metric, str(number))


def named(metric: Metric, name: str) -> Metric:
    """The metric with `name` in place of `{n}`."""
    chart = metric.chart and (metric.chart[0], metric.chart[1].format(n=name))
    over = metric.over.format(n=name)
    return dataclasses.replace(metric, meaning=metric.meaning.format(n=name), over=over, chart=chart)


def rows(
    prefix: str,
    metrics: Mapping[str, Metric],
    *,
    over: str = "",
    late: bool = False,
    needs: tuple[Feature, ...] = (),
    at_times: bool = False,
) -> dict[str, Metric]:
    """The metrics with what they have in common, their names behind `prefix`."""
    return {
        prefix + name: dataclasses.replace(
            metric,
            over=metric.over or over,
            late=metric.late or late,
            needs=needs + metric.needs,
            at_times=metric.at_times or at_times,
        )
        for name, metric in metrics.items()
    }


def distribution(name: str, unit: str, of: str, chart: str = "") -> dict[str, Metric]:
    """Mean, median, 99th percentile and maximum of one number; all but the median are curves of `chart`."""
    statistics = {"mean": "Mean", "p50": "Median", "p99": "99th percentile", "max": "Maximum"}
    return {
        f"{name}_{suffix}": Metric(
            unit, f"{word} of {of}.", chart=(chart, word.lower()) if chart and suffix != "p50" else None
        )
        for suffix, word in statistics.items()
    }
