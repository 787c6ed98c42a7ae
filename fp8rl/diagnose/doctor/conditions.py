"""Runs the checks that a run begins with, and shows each data source's first prompt and the rewards of its answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from fp8rl.diagnose.doctor.doctor_report import DataFound, Diagnosis
from fp8rl.diagnose.report import Finding
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions import check, check_functions
from fp8rl.rl.experiment.preconditions.data import check_data, evaluated
from fp8rl.rl.experiment.preconditions.tokenizer import read_tokenizer, rendering
from fp8rl.rl.run.feed.judging import arguments, of_group
from fp8rl.rollout.tasks.data import Source, load_problems
from fp8rl.rollout.tasks.rewards import RewardSection, RewardsSection, load_function
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN
from fp8rl.rollout.tasks.rewards.workers import RewardFailure, Workers
from fp8rl.rollout.tasks.tokens import behind_ids, text_of
from fp8rl.rollout.types import Problem, prompt_ids

LONGEST_ANSWER = 100_000
"""The most characters of an answer that are tokenized: a longer answer would take minutes."""


def with_conditions(diagnosis: Diagnosis, experiment: Experiment) -> Diagnosis:
    """Return `diagnosis` with the errors and notes of a run's start, and the data of the spec.

    A start ends at its first error. The data are still read, because that needs only the model's tokenizer.
    """
    notes: list[str] = []
    refused: dict[str, UserError] = {}
    data: list[DataFound] = []
    steps: list[Callable[[], object]] = [
        lambda: check(experiment, notes.append),
        lambda: check_data(experiment, read_tokenizer(experiment.model.directory, sys.maxsize), notes.append),
        lambda: check_functions(experiment) if experiment.needs_engines else None,
    ]
    for step in steps:
        try:
            step()
        except UserError as error:
            refused.setdefault(error.key or str(error), error)
        if not refused:
            break  # the first has all that the others check
    try:
        for found in data_found(experiment):
            data.append(found)
    except Exception:  # of a tokenizer, a row or a chat template, whatever such a program may raise
        if not refused:
            raise
    noted = (Finding("", note, grade="note") for note in dict.fromkeys(notes))
    findings = (*map(Finding.of_error, refused.values()), *diagnosis.findings, *noted)
    return replace(diagnosis, findings=findings, data=tuple(data))


def data_found(experiment: Experiment) -> Iterator[DataFound]:
    """Read each source: first the sources of training, then the sources of evaluation.

    Plain reward functions are called in a process of their own, with their time limit, as in a run.
    """
    tokenizer = read_tokenizer(experiment.model.directory, sys.maxsize)
    trained = experiment.rewards if experiment.algorithm.samples else None
    sources: list[tuple[Source, RewardsSection | None]] = [(source, trained) for source in experiment.data.training]
    sources += [(source, rewards) for source, _, _, rewards in evaluated(experiment)]
    for source, rewards in sources:
        problems = load_problems(source)
        first = problems[0]
        with rendering():  # where a check was refused that would have tried the template
            ids = prompt_ids(tokenizer, first)
        tokens = len(behind_ids(tokenizer, first.answer[:LONGEST_ANSWER]))
        prompt, of_answer = text_of(tokenizer, ids, first=True), _rewards(rewards, first, tokens) if rewards else {}
        yield DataFound(source.key, str(source.path), len(problems), prompt, len(ids), first.answer, of_answer)


def _rewards(config: RewardsSection, problem: Problem, tokens: int) -> dict[str, str]:
    """Call each function on the reference answer. Return its reward as text."""
    offered = arguments(problem, [("model", problem.answer)], tokens)
    with closing(Workers(config.functions, 1)) as workers:
        return {each.label: _reward(workers, index, each, offered) for index, each in enumerate(config.functions)}


def _reward(workers: Workers, index: int, config: RewardSection, offered: dict[str, Any]) -> str:
    name = config.function
    try:
        function = load_function(config, f"rewards.functions.{index}")
    except UserError:
        return "none: the function is refused"
    if name == "environment":
        return "what the environment returns"
    if function.is_async:
        return "not known: the function may call a service, so it was not called"
    if function.of_group:
        offered = of_group([offered])
    asked = function.asked(offered)
    try:
        if name in BUILT_IN and BUILT_IN[name].cheap:
            (numbers,) = function.parts(function(asked), 1)
        else:
            (numbers,) = workers.call(index, asked, 1, function.config.timeout_s)
    except RewardFailure as failure:
        return f"nothing: {str(failure).strip().splitlines()[-1]}"
    return ", ".join(f"{part} {value:g}" if part else f"{value:g}" for part, value in numbers.items())
