"""Where does a mismatch do harm? Runs whose engine has a persistent bias, under algorithms whose advantages do or do
not average to zero.

A run is `fp8rl train` of the demo's model, M, at a temperature of 2, at which its answers have some entropy. The runs
are made in parts, as those of `benefit`: `python -m lab.studies.drift --hours 2 [--arms TEXT]`. The arms that claims
speak of come first. `fp8rl study drift` judges the claims, once none of these runs is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from fp8rl.rl.record.metrics_log import Row
from lab.studies.harness import figures, live, retries
from lab.studies.harness.biased import Bias
from lab.studies.harness.claims import claims_of
from lab.studies.harness.kept_runs import Job, Settings, by_arm, collapsed, draw_curve, go_on, mean_tables
from lab.studies.harness.lab import Lab
from lab.studies.harness.study import Measurement, Study, TextTable

RUNS = Path("runs/drift")
KEPT = Path("lab/docs/studies/drift.jsonl")
STEPS, QUICK_STEPS = 300, 2
SEEDS = 5
SPAN = 20
"""Steps that the points of a curve are the means of."""
TEACHER = RUNS / "GRPO_exact_0/model"
"""What a run of the study has learnt, for distillation."""

BASE: Settings = {
    "rollout.prompts_per_step": 8,
    "rollout.temperature": 2.0,
    "eval.problems": 128,
    "eval.every": 100,
    "checkpoint.every": 100,
    "gates": "[]",
    "algorithm.tis_cap": "null",
}
REINFORCE = "lab.studies.harness.reinforce:Reinforce"
ALGORITHMS: dict[str, Settings] = {
    "GRPO": {},
    "REINFORCE below zero": {"algorithm": f"{{name: '{REINFORCE}', baseline: 1.0}}"},
    "REINFORCE": {"algorithm": f"{{name: '{REINFORCE}'}}"},
    "PPO, not whitened": {"algorithm": "{name: ppo, whiten_advantages: false, critic: {lr: 1.0e-3}}"},
    "distillation": {"algorithm": "{name: opd}", "rollout.temperature": 1.0, "teacher.path": TEACHER.resolve()},
    "GRPO, wrong answers longer": {
        "model.path": retries.model_in(RUNS).resolve(),
        "rollout.max_new_tokens": retries.LONGEST,
    },
    "GRPO, one step off": {"rollout.staleness": 1, "algorithm.ratio": "recompute"},
    "GRPO, three steps off": {"rollout.staleness": 3, "algorithm.ratio": "recompute"},
}
NATIVE: Settings = {"numerics.mode": "native"}
MIXED: Settings = {**NATIVE, "numerics.trainer": "bf16"}
BIASED: Settings = {"sync.canary": "false"}
"""The canary would replace such an engine."""
TIS: Settings = {"algorithm.tis_cap": 2.0}
CENTERED: Settings = {"algorithm.centering": 16}
ARMS: dict[str, tuple[Settings, Bias | None]] = {
    "exact": ({}, None),
    "head offset": (BIASED, "head"),
    "head offset, TIS": ({**BIASED, **TIS}, "head"),
    "head offset, centering": ({**BIASED, **CENTERED}, "head"),
    "4 bits": (BIASED, "e2m1"),
    "4 bits, TIS": ({**BIASED, **TIS}, "e2m1"),
    "4 bits, centering": ({**BIASED, **CENTERED}, "e2m1"),
    "native FP8": (NATIVE, None),
    "BF16 trainer": (MIXED, None),
    "BF16 trainer, TIS": ({**MIXED, **TIS}, None),
    "BF16 trainer, centering": ({**MIXED, **CENTERED}, None),
    "BF16 trainer, TIS and centering": ({**MIXED, **TIS, **CENTERED}, None),
    "exact, again": ({}, None),
    "exact, slow": ({"trainer.lr": 1e-6}, None),
}
PAIR = ("exact", "head offset")
CHOSEN: dict[str, Sequence[str]] = {
    "REINFORCE below zero": tuple(ARMS)[:-2],
    "REINFORCE": PAIR,
    "GRPO": (*PAIR, "BF16 trainer", "exact, again", "exact, slow"),
    "PPO, not whitened": PAIR,
    "distillation": PAIR,
    "GRPO, one step off": PAIR,
    "GRPO, three steps off": PAIR,
    "GRPO, wrong answers longer": PAIR,
}
"""The arms of each algorithm."""
CLAIMS = claims_of("drift")
CLAIMED = tuple(dict.fromkeys(arm for claim in CLAIMS for arm in (claim.arm, claim.against) if arm is not None))
"""The arms that claims speak of: their runs come first, and verdicts wait for no others."""
QUICK = ("GRPO: exact", "GRPO: exact, again", "GRPO: head offset")


def arms() -> Iterator[tuple[str, Settings, Bias | None]]:
    """All arms with their settings and the bias of their engines."""
    for algorithm, chosen in CHOSEN.items():
        for arm in chosen:
            own, bias = ARMS[arm]
            # Keys of the algorithm come after the algorithm, of whose settings they are.
            yield f"{algorithm}: {arm}", {**ALGORITHMS[algorithm], **BASE, **ALGORITHMS[algorithm], **own}, bias


def jobs(seeds: Sequence[int], folder: Path = RUNS, kept: Path = KEPT, steps: int = STEPS) -> list[Job]:
    """Every run, first of the arms that claims speak of, then of the others; of each, one seed after the other."""
    made: dict[str, Callable[[], object]] = {
        "distillation": make_teacher,
        "GRPO, wrong answers longer": partial(retries.make, RUNS),
    }
    every = [
        Job(arm, seed, steps, folder, kept, outcome, own, bias, made.get(arm.partition(": ")[0]))
        for seed in seeds
        for arm, own, bias in arms()
    ]
    return sorted(every, key=lambda job: job.arm not in CLAIMED)


def make_teacher() -> None:
    """Make the run again whose model distillation learns from, unless this machine has made it."""
    if not TEACHER.is_dir():
        next(job for job in jobs([0]) if job.name == TEACHER.parent.name).train()


def measure(lab: Lab) -> Measurement:
    """Read the runs that are finished. A quick run makes short ones of some arms."""
    lab.specs["FP8"] = live.exact().spec.digest()
    known = jobs(lab.seeds)
    if lab.quick:
        quick = jobs(lab.seeds, lab.scratch, lab.scratch / "runs.jsonl", QUICK_STEPS)
        known = [job for job in quick if job.arm in QUICK]
        lab.each(Job.make, [(job, time.time() + 3600) for job in known], "runs")
    values, _ = by_arm(known)
    _, missing = by_arm([job for job in known if job.arm in CLAIMED])
    subject = f"M, 1.0M parameters, {QUICK_STEPS if lab.quick else STEPS} steps of 64 answers, temperature 2"
    return Measurement(values=values, subject=subject, missing=missing)


def outcome(rows: Sequence[Row]) -> dict[str, float]:
    """Numbers of a run: curves in spans of 20 steps, what its reward gained and what is left of its best, and the last
    span's entropy and bias."""
    learned = [row for row in rows if row["step"] > 0]
    spans = [learned[at : at + SPAN] for at in range(0, len(learned), SPAN)]

    def curve(metric: str) -> list[float]:
        return [fmean([row[metric] for row in span if metric in row] or [0.0]) for span in spans]

    rewards, accuracy = curve("rollout/reward_mean"), [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    curves = {
        "reward": rewards,
        "entropy": curve("train/entropy"),
        "bias": curve("mismatch/bias"),
        "context_bias": curve("mismatch/context_bias"),
        "k3": curve("mismatch/k3_kl"),
        "tokens": curve("rollout/response_tokens_mean"),
        "grad_norm": curve("train/grad_norm"),
    }
    return {
        "gain": rewards[-1] - rewards[0],
        "left": rewards[-1] / max(*rewards, 1e-9),
        "collapsed": float(collapsed(rewards)),
        "accuracy": accuracy[-1],
        **{name: values[-1] for name, values in curves.items()},
        **{f"{name}/{SPAN * at}": value for name, values in curves.items() for at, value in enumerate(values, 1)},
    }


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    drawn = {}
    for algorithm in CHOSEN:
        mine = [arm for arm in measurement.values if arm.startswith(f"{algorithm}: ")]
        if not mine:
            continue
        picture = figures.figure(algorithm, columns=3, width=11.0)
        for axes, metric in zip(picture.axes, ("reward", "entropy", "bias"), strict=True):
            for index, arm in enumerate(mine):
                draw_curve(axes, measurement, arm, metric, name=arm.partition(": ")[2], index=index)
            axes.set(xlabel="step", ylabel=metric)
        figures.shared_legend(picture)
        drawn[algorithm.replace(", ", "_").replace(" ", "_")] = picture
    return drawn


def tables(measurement: Measurement) -> Sequence[TextTable]:
    metrics = ("reward", "gain", "left", "collapsed", "entropy", "bias", "context_bias", "k3", "accuracy")
    return mean_tables(measurement, metrics)


STUDY = Study(
    name="drift",
    question="Where does a persistent mismatch do harm, and what helps: importance weights, centering, or exactness?",
    seeds=SEEDS,
    claims=CLAIMS,
    measure=measure,
    draw=draw,
    tables=tables,
    units={"bias": "nats", "context_bias": "nats", "entropy": "nats", "k3": "nats"},
)


if __name__ == "__main__":
    go_on("drift", jobs(range(SEEDS)))
