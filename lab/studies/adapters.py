"""Adapters in place of all weights: what do they learn, and what of a merged update survives the FP8 grid?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab, trained
from lab.studies.harness.study import Measurement, Study, TextTable, by_arm, with_interval

STEPS, QUICK_STEPS = 30, 3
LAST = 10
"""Steps at the end of a run whose mean reward is taken."""
RATE = 1e-4
"""Learning rate of full training, as in the demo; adapters take ten times as much."""
FULL, SEPARATE, MERGED, AGAIN = "full", "separate", "merged", "separate, again"
RANK_1, SLOW, MERGED_SLOW = "separate, rank 1", "separate at full training's rate", "merged at full training's rate"


@dataclass(frozen=True)
class Arm:
    """The weights that a run trains. rank: of its adapters, alpha is twice as much; 0: all weights are trained."""

    rank: int = 16
    mode: str = "separate"
    rate: float = 10 * RATE

    def settings(self) -> dict[str, object]:
        """Keys of the spec."""
        adapter = f"{{rank: {self.rank}, alpha: {2 * self.rank}, mode: {self.mode}}}"
        return {"trainer.lr": self.rate, **({"adapter": adapter} if self.rank else {})}


ARMS = {
    FULL: Arm(rank=0, rate=RATE),
    SEPARATE: Arm(),
    AGAIN: Arm(),
    MERGED: Arm(mode="merged"),
    RANK_1: Arm(rank=1),
    SLOW: Arm(rate=RATE),
    MERGED_SLOW: Arm(mode="merged", rate=RATE),
}
QUICK_ARMS = (FULL, SEPARATE, AGAIN, MERGED, SLOW)


def measure(lab: Lab) -> Measurement:
    """Runs of the demo by the command itself, two at a time."""
    lab.specs["all arms"] = live.exact().spec.digest()
    chosen = {name: arm for name, arm in ARMS.items() if not lab.quick or name in QUICK_ARMS}
    steps = QUICK_STEPS if lab.quick else STEPS
    jobs = [(name, arm, seed, steps, lab.scratch) for seed in lab.seeds for name, arm in chosen.items()]
    rows = lab.each(_run, jobs, "runs")
    count = len(chosen)
    found = [dict(zip(chosen, rows[at : at + count], strict=True)) for at in range(0, len(rows), count)]
    subject = f"M, 1.0M parameters, {steps} GRPO steps of the demo, exact mode"
    return Measurement(values=by_arm(found), subject=subject)


def _run(name: str, arm: Arm, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """Means over a run; the reward is that of the last steps."""
    settings = arm.settings() | {"run.seed": seed, "run.steps": steps, "checkpoint.every": steps, "eval.every": 0}
    rows = trained(live.EXAMPLES / "arithmetic.yaml", folder, f"arm{list(ARMS).index(name)}_{seed}", settings)
    learned = [row for row in rows if row["step"] > 0]
    survival = [row.get("train/update_survival", 1.0) for row in learned]
    d = [row["mismatch/train_rollout_logprob_abs_diff_mean"] for row in learned]
    reward = [row["rollout/reward_mean"] for row in learned]
    return {
        "accuracy": rows[-1]["eval/accuracy"],
        "reward": sum(reward[-LAST:]) / len(reward[-LAST:]),
        "abs_d": sum(d) / len(d),
        "survival": sum(survival) / len(survival),
        **{f"reward/{row['step']}": row["rollout/reward_mean"] for row in learned},
        **{f"survival/{row['step']}": each for row, each in zip(learned, survival, strict=True)},
    }


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    drawn = figures.figure("Adapters and full training", columns=2, width=9.0)
    steps = [int(name.partition("/")[2]) for name in measurement.values[FULL] if name.startswith("reward/")]
    for axes, metric, label in zip(drawn.axes, ("reward", "survival"), ("mean reward", "cosine"), strict=True):
        for index, arm in enumerate(measurement.values):
            if arm != AGAIN and (metric == "reward" or arm.startswith("merged")):
                points = [measurement.of(arm, f"{metric}/{step}") for step in steps]
                figures.curve(axes, steps, points, name=arm, index=index)
        axes.set(xlabel="step", ylabel=label)
    figures.legend(drawn.axes[0])
    return {"runs": drawn}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    columns = ("arm", "held-out accuracy", "above full", "reward", "abs d", "survival")
    rows = []
    for arm in measurement.values:
        numbers = [f"{measurement.mean(arm, metric):.3g}" for metric in ("reward", "abs_d", "survival")]
        above = with_interval(measurement.of(arm, "accuracy", against=FULL), "+.3f")
        rows.append([arm, f"{measurement.mean(arm, 'accuracy'):.3f}", above, *numbers])
    return [TextTable("Means over the seeds; survival is 1 where nothing is merged", columns, rows)]


STUDY = Study(
    name="adapters",
    question="What do adapters learn beside full training, and what of a merged update survives the FP8 grid?",
    seeds=5,
    claims=claims_of("adapters"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={"abs_d": "nats"},
)
