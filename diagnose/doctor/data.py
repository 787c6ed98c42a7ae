"""The data of a spec as a run would meet them: the first prompt of each source, and its reference as rewards see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fp8rl.diagnose.doctor.judge import DataFound
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.data import evaluated
from fp8rl.rl.experiment.preconditions.tokenizer import load_tokenizer
from fp8rl.rollout.data.sources import Source, load_problems
from fp8rl.rollout.data.tasks import Problem, prompt_ids
from fp8rl.rollout.rewards.builtin import BUILT_IN
from fp8rl.rollout.rewards.config import RewardsSection
from fp8rl.rollout.rewards.functions import EACH, RewardFunction, load_function
from fp8rl.rollout.rewards.workers import RewardFailure, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_ENVIRONMENT = "environment"
"""The reward of ours that repeats what the environment returns."""


def data_found(experiment: Experiment) -> tuple[DataFound, ...]:
    """Return what each source holds: those that are trained on, then those that are evaluated.

    Plain reward functions are called in a process of their own, with their time limit, as in a run.
    """
    tokenizer = load_tokenizer(experiment.model.path, "model.path")
    found = []
    for source, rewards in _sources(experiment):
        problems = load_problems(source)
        first = problems[0]
        ids = prompt_ids(tokenizer, first)
        found.append(
            DataFound(
                source.key,
                str(source.path),
                len(problems),
                tokenizer.decode(ids),
                len(ids),
                first.answer,
                {} if rewards is None else _rewards(rewards, first, _tokens(tokenizer, first.answer)),
            )
        )
    return tuple(found)


def _tokens(tokenizer: PreTrainedTokenizerBase, answer: str) -> int:
    """Return the number of an answer's tokens; of a long one, whose tokenizing takes minutes, of its beginning."""
    return len(tokenizer(answer[:_LONGEST], add_special_tokens=False).input_ids)


_LONGEST = 100_000
"""Characters."""


def _sources(experiment: Experiment) -> Iterator[tuple[Source, RewardsSection | None]]:
    rewarded = experiment.algorithm.samples
    for source in experiment.data.training:
        yield source, experiment.rewards if rewarded else None
    for source, _, _, rewards in evaluated(experiment):
        yield source, rewards


def _rewards(config: RewardsSection, problem: Problem, tokens: int) -> dict[str, str]:
    """Return what each function gives to the reference answer, as text."""
    answer = problem.answer
    offered: dict[str, Any] = {
        "question": problem.question,
        "reference": answer,
        "fields": problem.fields,
        "answer": answer,
        "finished": True,
        "tokens": tokens,
        "turns": [("model", answer)],
        "outcome": {},
    }
    workers = Workers(config.functions, 1)
    try:
        return {
            each.label: _verdict(workers, index, load_function(each, f"rewards.functions.{index}"), offered)
            for index, each in enumerate(config.functions)
        }
    finally:
        workers.close()


def _verdict(workers: Workers, index: int, function: RewardFunction, offered: dict[str, Any]) -> str:
    name = function.config.function
    if name == OF_ENVIRONMENT:
        return "what the environment returns"
    if function.is_async:
        return "not asked here, as it may ask a service"
    if function.of_group:
        offered = offered | {each: [offered[each]] for each in EACH} | {"answers": [offered["answer"]]}
    asked = function.asked(offered)
    try:
        if name in BUILT_IN and BUILT_IN[name].cheap:
            (numbers,) = function.parts(function(asked), 1)
        else:
            (numbers,) = workers.call(index, asked, 1, function.config.timeout_s)
    except RewardFailure as failure:
        return f"nothing: {str(failure).strip().splitlines()[-1]}"
    return ", ".join(f"{part} {value:g}" if part else f"{value:g}" for part, value in numbers.items())
