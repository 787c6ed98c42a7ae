"""Held-out problems answered greedily."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from numerics.sampling import GREEDY
from rl.experiment import Experiment
from rl.guard.evidence import Evidence
from rl.mismatch import token_versions
from rl.run.batching import batch_from_trajectories
from rl.run.feed import Answer, to_prompts
from rl.run.stack import Stack
from rollout.data import load_problems
from rollout.types import Group, Prompt
from trainer.actor import TrainerGroup


def held_out_prompts(experiment: Experiment, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The problems of `data.eval`, as many as `eval.problems`; none if evaluation is off."""
    if experiment.data.eval is None or experiment.eval.problems == 0:
        return []
    held_out = load_problems(experiment.data.source(experiment.data.eval, "data.eval"))
    return to_prompts(tokenizer, held_out[: experiment.eval.problems])


def is_due(experiment: Experiment, step: int) -> bool:
    """Whether `step` ends with an evaluation."""
    every = experiment.eval.every
    return experiment.eval.problems > 0 and (step == experiment.run.steps or bool(every and step % every == 0))


def answer_greedily(stack: Stack, prompts: Sequence[Prompt]) -> list[Answer]:
    """One greedy answer to each prompt, judged."""
    if not prompts:
        return []
    answers = stack.sample([Group(prompt, seeds=(GREEDY,)) for prompt in prompts], 0.0)
    verdicts = [stack.judge.begin(prompts[answer.group], [answer]) for answer in answers]
    return [
        Answer.of(prompts[answer.group], answer, *stack.judge.wait(verdict))
        for answer, verdict in zip(answers, verdicts, strict=True)
    ]


def accuracy(experiment: Experiment, answers: Sequence[Answer]) -> dict[str, float]:
    """`eval/...` of judged answers; none without answers."""
    if not answers:
        return {}
    first = experiment.rewards.functions[0].label
    said = [value for answer in answers for name, value in answer.parts.items() if name.partition("/")[0] == first]
    return {"eval/accuracy": sum(said) / len(answers), "eval/problems": float(len(answers))}


def agreement_on(answers: Sequence[Answer], trainer: TrainerGroup, *, replay: bool, tis_cap: float) -> dict[str, float]:
    """`mismatch/...` over greedy answers, whose log-probabilities the engine reports at temperature 1."""
    if not answers:
        return {}
    trajectories = [answer.trajectory for answer in answers]
    batch = batch_from_trajectories(trajectories, 1.0, replay=replay)
    scored, versions = trainer.score_routed(batch), token_versions(trajectories, batch.loss_mask)
    return Evidence(batch, versions, trainer.weight_version, scored.logprobs, scored.routes).metrics(tis_cap)
