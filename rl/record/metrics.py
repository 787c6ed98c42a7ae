"""Every metric of a run. Gates, reports, the reference page, wandb and the tests of real runs read this registry.

A name is `group/name`. Groups: `rollout/` sampling and rewards, `train/` the optimizer steps, `critic/` the critic's,
`mismatch/` trainer against engine on tokens that the trainer's own weights have sampled, `drift/` the same on trained
tokens that older ones have sampled, `gates/` what followed from it, `sync/` weight synchronisation, `perf/` time,
`memory/` what trainer and engines move as they take turns, `eval/` held-out problems, `tracking/` the log itself.
Unless said otherwise a metric describes one step, those of `train/` and `critic/` as means over its updates; d is
trainer minus rollout logprob of a sampled token, rho = e^d. `p50` and `p99` are percentiles by nearest rank. Exponents
are clamped to ±20.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from fp8rl.rl.mismatch.drift import OLDEST
from fp8rl.rl.mismatch.statistics import POSITION_STARTS
from fp8rl.rl.record.metric import Family, Metric, named, rows
from fp8rl.rl.record.metric_rows import ANSWERS, METRICS

AGE = "Age of the tokens"
"""The chart of the tokens by the age of the weights that sampled them."""

REWARD_PARTS = "rollout/reward/"
"""Metrics that the reward functions of an experiment name."""
OUTCOMES = "rollout/outcome/"
"""Metrics that its environment names."""

_AGES = range(OLDEST + 1)
FAMILIES: dict[str, Family] = {
    "rollout/tokens_age_": Family(
        Metric(
            "tokens",
            f"Generated tokens sampled {{n}} weight versions before the trainer's; {OLDEST} stands for that and more.",
            needs=("samples",),
            at_times=True,
            chart=(AGE, "age {n}"),
        ),
        _AGES,
    ),
    "drift/tokens_age_": Family(
        Metric("tokens", "`drift/tokens` of age {n}.", needs=("samples", "staleness"), at_times=True), _AGES[1:]
    ),
    "drift/abs_diff_mean_age_": Family(
        Metric(
            "nats",
            "Mean of abs(d) of the tokens of age {n}.",
            over="drift/tokens_age_{n}",
            needs=("samples", "staleness"),
            at_times=True,
            chart=("Drift by age", "age {n}"),
        ),
        _AGES[1:],
    ),
    **{
        f"mismatch/{name}_pos_": Family(
            Metric(
                unit,
                f"{meaning} in the bucket from position {{n}} of the generated tokens; buckets begin at "
                f"{', '.join(map(str, POSITION_STARTS))}.",
                over=over,
                needs=("samples",),
                at_times=True,
            ),
            POSITION_STARTS,
        )
        for name, unit, meaning, over in (
            ("abs_diff_mean", "nats", "Mean of abs(d)", "mismatch/tokens_pos_{n}"),
            ("abs_diff_max", "nats", "Largest abs(d)", ""),
            ("tokens", "tokens", "Tokens with finite d", ""),
        )
    },
    "mismatch/router_agreement_layer_": Family(
        Metric(
            "",
            "As `mismatch/router_agreement`, of MoE layer {n}, counted from 0.",
            over="its pairs of this layer",
            needs=("samples", "routes"),
            at_times=True,
        ),
        range(1 << 16),
    ),
}
"""The families by their members' name without its number."""

_OF_A_SET: dict[str, Metric] = rows(
    "",
    {
        "accuracy": Metric("", "Mean of the first reward over all answers of the set.", "the set's answers"),
        "problems": Metric("problems", "Problems of the set that were evaluated."),
        "finished_fraction": Metric("", "Fraction of its answers that ended by themselves within the limit."),
        "response_tokens_mean": Metric("tokens", "Mean generated tokens of its answers."),
        "avg@": Metric("", "Its accuracy, by the name of the field: the mean over {n} answers to each problem."),
        "pass@": Metric("", "Mean chance that one of {n} answers to a problem is right, estimated without bias."),
    },
    late=True,
    needs=("evaluation",),
    at_times=True,
)
"""The metrics of an evaluation set, `eval/NAME/...`."""


@cache
def describe(name: str) -> Metric | None:
    """The metric of this name, fixed or member of a family; None if a run has no such metric."""
    if name in METRICS:
        return METRICS[name]
    if name.startswith(REWARD_PARTS):
        part = name.removeprefix(REWARD_PARTS)
        meaning = f"Mean of `{part}`, a part of the reward, unweighted."
        return Metric("", meaning, over=ANSWERS, needs=("samples",), at_times=True, chart=("Parts of the reward", part))
    if name.startswith(OUTCOMES):
        part = name.removeprefix(OUTCOMES)
        meaning, chart = f"Mean of `{part}`, which the environment returned.", ("Outcomes of the environment", part)
        return Metric("", meaning, over=ANSWERS, needs=("samples", "environment"), at_times=True, chart=chart)
    if of_a_set := re.fullmatch(r"eval/([^/]+)/([a-z_]+@?)([1-9]\d*)?", name):
        member = _OF_A_SET.get(of_a_set[2])
        counted = of_a_set[2].endswith("@") == (of_a_set[3] is not None)
        if member is None or not counted:
            return None
        drawn = ("Held-out accuracy", name.removeprefix("eval/")) if of_a_set[2] in ("accuracy", "pass@") else None
        return replace(named(member, of_a_set[3] or ""), chart=drawn)
    return _member(name)


def is_fixed(name: str) -> bool:
    """Return whether any run may have this metric: no reward, environment or evaluation set of a spec names it."""
    return name in METRICS or _member(name) is not None


def _member(name: str) -> Metric | None:
    match = re.fullmatch(r"(.*_)(0|[1-9]\d*)", name)
    family = FAMILIES.get(match[1]) if match else None
    if match is None or family is None or int(match[2]) not in family.numbers:
        return None
    return family.member(int(match[2]))


def nearest_metric(name: str) -> str:
    """The metric whose name is most like `name`; a family stands by its first member that is like it."""
    members = [f"{prefix}{number}" for prefix, family in FAMILIES.items() for number in [*family.numbers][:16]]
    (nearest,) = difflib.get_close_matches(name, [*METRICS, *members], n=1, cutoff=0.0)
    return nearest


def metric(name: str) -> Metric:
    """The declared metric, or a blank one for a name outside the tables."""
    return describe(name) or Metric("", "")


# docs/metrics.md, written from the registry: `python -m fp8rl.rl.record.metrics`.

PAGE = Path("docs/metrics.md")
_HEAD = """\
# Metrics

Every number that a step writes into `metrics.jsonl`. This page is written from the registry (`rl/record/metrics.py`)
by `python -m fp8rl.rl.record.metrics`; change it there.

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
