"""The data files: every line whole, every reference answer of the reward's kind, every prompt short enough."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from numerics.errors import user_error
from rl.experiment import Experiment
from rollout.data import load_problems
from rollout.rewards.builtin import BUILT_IN
from rollout.tasks import Problem, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_PER_BYTE = 4
"""No tokenizer in use yields more tokens for a byte of text; texts safely short by this bound need no tokenizing."""


def check_data(experiment: Experiment, tokenizer: PreTrainedTokenizerBase) -> None:
    """Read both files and check each problem.

    Raises:
        UserError: a file is missing or empty, or one of its lines (named by number) cannot be used.
    """
    supervised = not experiment.algorithm.samples
    train = load_problems(experiment.data.train, "data.train")
    _check_lengths(train, "data.train", experiment, tokenizer, supervised)
    if not supervised:
        _check_answers(train, "data.train", experiment)
    if experiment.eval.problems == 0:
        return
    if experiment.data.eval is None:
        raise user_error(
            "data.eval",
            found=None,
            expected=f"a file, since eval.problems is {experiment.eval.problems}",
            remedy="Set data.eval, or turn evaluation off by eval.problems=0.",
        )
    held_out = load_problems(experiment.data.eval, "data.eval")
    if len(held_out) < experiment.eval.problems:
        raise user_error(
            "eval.problems",
            found=experiment.eval.problems,
            expected=f"at most the {len(held_out)} problems of data.eval",
            remedy=f"Set eval.problems={len(held_out)} or add problems.",
        )
    _check_lengths(held_out, "data.eval", experiment, tokenizer, supervised=False)
    _check_answers(held_out, "data.eval", experiment)


def _check_answers(problems: list[Problem], key: str, experiment: Experiment) -> None:
    for name in [config.function for config in experiment.rewards.functions if config.function in BUILT_IN]:
        reads = BUILT_IN[name].reads
        for number, problem in enumerate(problems, start=1):
            if reads is not None and not reads(problem.answer):
                raise user_error(
                    f"{key}: line {number}: answer",
                    found=problem.answer,
                    expected=f"{BUILT_IN[name].reference}, as the reward {name} reads",
                    remedy=f"Correct line {number}, or name other rewards.",
                )


def _check_lengths(
    problems: list[Problem], key: str, experiment: Experiment, tokenizer: PreTrainedTokenizerBase, supervised: bool
) -> None:
    """Prompt plus answer (given when supervised, else up to max_new_tokens) must fit rollout.context_length."""
    limit = experiment.rollout.context_length
    room = limit - (1 if supervised else experiment.rollout.max_new_tokens)
    template = len(prompt_ids(tokenizer, Problem("", "")))
    widest = functools.cache(lambda: max(len(token.encode()) for token in tokenizer.get_vocab()))  # few data need it
    for number, problem in enumerate(problems, start=1):
        size = len((problem.question + (problem.answer if supervised else "")).encode())
        if template + TOKENS_PER_BYTE * size <= room:
            continue
        if size > room * widest():  # tokenizing megabytes takes minutes
            tokens = -(-size // widest())
        else:
            tokens = len(prompt_ids(tokenizer, problem))
            if supervised:
                tokens += len(tokenizer(problem.answer, add_special_tokens=False).input_ids)
        if tokens > room:
            what = "question and answer" if supervised else "a prompt"
            answer = f"rollout.max_new_tokens = {experiment.rollout.max_new_tokens}"
            rest = "the end of sequence" if supervised else answer
            raise user_error(
                f"{key}: line {number}",
                found=f"{what} of {size} bytes, at least {tokens} tokens",
                expected=f"at most {room}, so that {rest} still fits rollout.context_length = {limit}",
                remedy=f"Raise rollout.context_length, or shorten or remove line {number}.",
            )
