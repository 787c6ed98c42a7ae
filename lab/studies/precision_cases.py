"""The four cases of unified FP8: which precision of trainer and rollout agrees, and what does each cost in KL?

Case 1: BF16 trainer, FP8 rollout. 2: the trainer's forward quantized too. 3: its backward as well. 4: FP8 kernels on
both sides, which on a CPU is case 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.step.batch import TokenBatch
from lab.studies.harness import figures, live
from lab.studies.harness.cases import CAPS, CASES, POW2, SequenceMetrics, by_sequence, by_token, cases_of, snapshot
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab, trained
from lab.studies.harness.study import Measurement, Study, TextTable
from lab.studies.harness.subjects import MODEL, random_model

if TYPE_CHECKING:
    from fp8rl.rl.run.run import Run

PROMPTS, QUICK_PROMPTS, ANSWERS = 32, 8, 8
FP32 = QuantSpec.preset("fp8_block_fp32")
MIXED, PLAIN = "mixed scale formats", "BF16 both"
TRAINED_STEPS = 20
"""Steps of the GRPO runs."""
TRAINED_SEEDS = 5


def measure(lab: Lab) -> Measurement:
    """Snapshots of a live trainer under every numerics; beside live engines; and short runs of GRPO."""
    lab.specs |= {"pow2 scales": POW2.digest(), "fp32 scales": FP32.digest()}
    prompts = QUICK_PROMPTS if lab.quick else PROMPTS
    models = {"M": MODEL} if lab.quick else {"M": MODEL, "N": random_model(lab.scratch)}
    jobs = [(name, path, lab.seeds, prompts) for name, path in models.items()]
    values: dict[str, dict[str, Any]] = {}
    for found in lab.each(_exact_snapshots, jobs, "snapshots, exact"):
        values |= found
    if lab.quick:
        values |= lab.alone(_beside_engine, "M native", MODEL, "native", lab.seeds, prompts, False)
    else:
        values |= lab.alone(_beside_engine, "M engine", MODEL, "exact", lab.seeds, prompts, False)
        for name, path, seeds, count in jobs:
            lab.say(f"{name} beside a native engine")
            values |= lab.alone(_beside_engine, f"{name} native", path, "native", seeds, count, True)
        values |= _grpo(lab)
    return Measurement(
        values=values,
        subject=f"M, 1.0M parameters, and N, 29M, random; {len(lab.seeds)} × {prompts * ANSWERS} answers; GRPO: "
        f"M, {TRAINED_STEPS} steps, {TRAINED_SEEDS} seeds, native",
        details={},
    )


def _exact_snapshots(name: str, model: Path, seeds: Sequence[int], prompts: int) -> dict[str, Any]:
    """Snapshots of a trainer that samples for itself."""
    e5m2 = POW2.override({"weight": {"format": "e5m2"}, "activation": {"format": "e5m2"}})
    found: dict[str, dict[str, list[list[float]]]] = {}
    with live.world() as layout:
        trainer = live.trainer_of(model, live.exact(POW2), layout)
        for seed in seeds:
            batch = live.sampled(trainer, seed, prompts, ANSWERS).batch
            numerics = cases_of(live.exact(POW2)) | {"again": live.exact(POW2, "bf16"), "E5M2": live.exact(e5m2)}
            tokens = by_token(trainer, batch, numerics)
            cases = {case: by_sequence(values, batch) for case, values in tokens.items()}
            trainer.set_numerics(live.exact(FP32))
            other = live.sampled(trainer, seed, prompts, ANSWERS).batch
            cases[MIXED] = snapshot(trainer, other)["case 3"]
            trainer.set_numerics(live.exact(POW2))
            _gather(found, f"{name} exact", cases)
    return found


def _beside_engine(
    name: str, model: Path, mode: str, seeds: Sequence[int], prompts: int, others: bool
) -> dict[str, Any]:
    """Snapshots of a trainer beside a live engine, which samples.

    others: BF16 on both sides and mixed scale formats too.
    """

    def batches(stack: Run) -> Iterator[TokenBatch]:
        for seed in seeds:
            yield live.sampled_by_engine(stack, seed, prompts, ANSWERS).batch

    found: dict[str, dict[str, list[list[float]]]] = {}
    with live.beside_engine(model, mode) as stack:
        for batch in batches(stack):
            _gather(found, name, stack.trainer.apply(snapshot, batch)[0])
        if others:
            stack.switch(replace(stack.numerics, spec=FP32))
            stack.syncing.sync()
            for batch in batches(stack):
                _gather(found, name, {MIXED: stack.trainer.apply(snapshot, batch)[0]["case 3"]})
            stack.switch(replace(stack.numerics, spec=POW2, trainer="bf16", rollout="bf16"))
            stack.syncing.sync()
            for batch in batches(stack):
                _gather(found, name, {PLAIN: stack.trainer.apply(snapshot, batch)[0]["case 1"]})
    return found


def _gather(found: dict[str, dict[str, list[list[float]]]], name: str, cases: SequenceMetrics) -> None:
    for case, metrics in cases.items():
        for metric, values in metrics.items():
            found.setdefault(f"{name}: {case}", {}).setdefault(metric, []).append(values)


def _grpo(lab: Lab) -> dict[str, dict[str, list[float]]]:
    """Short native runs by the command itself, two at a time."""
    jobs = [(precision, seed, lab.scratch) for precision in CASES.values() for seed in range(TRAINED_SEEDS)]
    rows = lab.each(_trained, jobs, "GRPO runs")
    values: dict[str, dict[str, list[float]]] = {}
    for index, case in enumerate(CASES):
        mine = rows[index * TRAINED_SEEDS : (index + 1) * TRAINED_SEEDS]
        values[f"GRPO: {case}"] = {metric: [row[metric] for row in mine] for metric in mine[0]}
    return values


def _trained(precision: str, seed: int, folder: Path) -> dict[str, float]:
    """Means over a run of 20 steps; the reward is that of the last 5."""
    settings = {
        "run.seed": seed,
        "run.steps": TRAINED_STEPS,
        "numerics.trainer": precision,
        "numerics.router_replay": "off",
        "gates": "[]",
        "rollout.prompts_per_step": 16,
        "eval.problems": 0,
        "checkpoint.every": TRAINED_STEPS,
    }
    rows = trained(live.EXAMPLES / "arithmetic_native.yaml", folder, f"{precision}_{seed}", settings)
    steps = [row for row in rows if row["step"] > 0]
    d = [row["mismatch/train_rollout_logprob_abs_diff_mean"] for row in steps]
    reward = [row["rollout/reward_mean"] for row in steps]
    return {
        "abs_d": sum(d) / len(d),
        "reward": sum(reward[-5:]) / 5,
        **{f"abs_d/{row['step']}": value for row, value in zip(steps, d, strict=True)},
        **{f"reward/{row['step']}": value for row, value in zip(steps, reward, strict=True)},
    }


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    snapshots = figures.figure(
        "Difference of log-probabilities and KL to the BF16 policy, by case", columns=2, width=9.0
    )
    groups = [
        name for name in ("M native", "N native", "M exact", "N exact") if f"{name}: case 1" in measurement.values
    ]
    shown = ("case 1", "case 2", "case 3", MIXED)
    for axes, metric, label in zip(snapshots.axes, ("abs_d", "kl"), ("abs d, nats", "KL, nats per token"), strict=True):
        have = [case for case in shown if all(f"{group}: {case}" in measurement.values for group in groups)]
        series = {case: [measurement.of(f"{group}: {case}", metric) for group in groups] for case in have}
        figures.bars(axes, groups, series, label=label)
    drawn = {"snapshots": snapshots}
    if "GRPO: case 1" in measurement.values:
        runs = figures.figure("20 GRPO steps, native", columns=2, width=9.0)
        for axes, metric, label in zip(runs.axes, ("abs_d", "reward"), ("abs d, nats", "mean reward"), strict=True):
            for index, case in enumerate(CASES):
                steps = range(1, TRAINED_STEPS + 1)
                points = [measurement.of(f"GRPO: {case}", f"{metric}/{step}") for step in steps]
                figures.curve(axes, list(steps), points, name=case, index=index)
            axes.set(xlabel="step", ylabel=label)
        figures.legend(runs.axes[0])
        drawn["grpo"] = runs
    return drawn


def tables(measurement: Measurement) -> Sequence[TextTable]:
    metrics = ("kl", "abs_d", *(f"clip_{cap:g}" for cap in CAPS), "reward")
    rows = [
        [arm, *(f"{measurement.mean(arm, m):.3g}" if m in found else "" for m in metrics)]
        for arm, found in measurement.values.items()
    ]
    return [TextTable("Means over tokens; clip: ρ > C", ("arm", *metrics), rows)]


STUDY = Study(
    name="precision_cases",
    question="Which precision of trainer and rollout agrees, and how far is each from the BF16 policy?",
    claims=claims_of("precision_cases"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={"kl": "nats", "abs_d": "nats"},
)
