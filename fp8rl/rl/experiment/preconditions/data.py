"""Checks the data: every problem is complete, its reference answer fits the reward, its prompt is short enough."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.tokenizer import check_template, rendering, template_remarks
from fp8rl.rl.experiment.sections import EvalSection
from fp8rl.rollout.tasks.chat import answer_ids
from fp8rl.rollout.tasks.data import Problems, Source, load_problems
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN
from fp8rl.rollout.tasks.tokens import TOKENS_PER_BYTE, behind_ids, fewest_tokens, text_of
from fp8rl.rollout.types import Problem, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALL_READ, SAMPLED = 100_000, 10_000
"""The first `ALL_READ` problems of a source are all checked. Of the others, a sample of `SAMPLED` is checked."""
DECODED, _LONG = 16, 10_000
"""How many answers of a source are tokenized and decoded as a check, and the most characters of such an answer."""
Say = Callable[[str], object]


def check_data(
    experiment: Experiment,
    tokenizer: PreTrainedTokenizerBase,
    say: Say = lambda text: None,
    pictures: Sequence[str] = (),
) -> None:
    """Read each source and check its problems; in a very large source, a sample of them.

    say: prints remarks for the user, who need not act on them. pictures: tokens that stand for a part of a picture.
    Raises UserError: a source is missing or empty, or one of its problems (named by number) cannot be used.
    """
    held_out = _HeldOut()
    for source, problems, room, rewards in evaluated(experiment):
        found = load_problems(source)
        if (asked := problems if problems is not None else min(experiment.eval.problems, len(found))) > len(found):
            key = "eval.problems" if source.key == "data.eval" else f"{source.key}.problems"
            expected = f"at most the {len(found)} problems of {source.key}"
            raise user_error(key, asked, expected, f"Set {key}={len(found)} or add problems.")
        check = _Check(found, experiment, tokenizer, room, rewards, pictures)
        for index, problem in _looked_at(found, say):
            check(problem, index)
            if index < asked:
                held_out.add(problem, index, found)
    supervised = not experiment.algorithm.samples
    for source in experiment.data.training:
        found = load_problems(source)
        room = 1 if supervised else experiment.rollout.max_new_tokens
        check = _Check(found, experiment, tokenizer, room, None if supervised else experiment.rewards, pictures)
        for index, problem in _looked_at(found, say):
            check(problem, index)
            held_out.meet(problem, index, found)
        several_turns = not supervised and experiment.has_environment
        with rendering():
            for remark in template_remarks(tokenizer, found[0].conversation, source, several_turns):
                say(remark)
        if (lost := _lost_text(tokenizer, found)) is not None:
            say(lost)
    for remark in held_out.remarks():
        say(remark)


def evaluated(experiment: Experiment) -> Iterator[tuple[Source, int | None, int, RewardsSection]]:
    """Yield source, number of problems (None: up to `eval.problems`), longest answer and rewards of each evaluation."""
    data, rollout, evaluation = experiment.data, experiment.rollout, experiment.eval
    if evaluation.problems == 0:
        return
    if data.eval is not None:
        source, default = data.source(data.eval, "data.eval"), EvalSection.model_fields["problems"].default
        asked = None if evaluation.problems == default else evaluation.problems
        yield source, asked, rollout.max_new_tokens, experiment.rewards
    elif not evaluation.sets:
        remedy = "Set data.eval, name sets in eval.sets, or turn evaluation off by eval.problems=0."
        raise user_error("data.eval", None, f"a file, since eval.problems is {evaluation.problems}", remedy)
    for index, one in enumerate(evaluation.sets):
        source = data.source(one, f"eval.sets.{index}")
        yield source, one.problems, one.max_new_tokens or rollout.max_new_tokens, one.rewards or experiment.rewards


def _looked_at(problems: Problems, say: Say) -> Iterator[tuple[int, Problem]]:
    """Yield the first `ALL_READ` problems, and a fixed sample of `SAMPLED` problems after them."""
    yield from islice(enumerate(problems), ALL_READ)
    if len(problems) > ALL_READ:
        count = min(SAMPLED, len(problems) - ALL_READ)
        for index in sorted(random.Random(0).sample(range(ALL_READ, len(problems)), count)):
            yield index, problems[index]
        unit = problems.name(0).partition(" ")[0]
        say(
            f"{problems.source.key}: looked at the first {ALL_READ} of {len(problems)} {unit}s and at {count} of the "
            "others"
        )


def _lost_text(tokenizer: PreTrainedTokenizerBase, problems: Problems) -> str | None:
    """Return a remark on the first answer that changes when it is encoded and decoded; None: no answer changes."""
    for index, problem in enumerate(islice(problems, DECODED)):
        answer = problem.answer
        if len(answer) <= _LONG and (back := text_of(tokenizer, behind_ids(tokenizer, answer))) != answer:
            return (
                f"{problems.source.key}: the tokenizer of model.path does not keep text: the answer of "
                f"{problems.name(index)}, {answer[:60]!r}, comes back as {back[:60]!r}. Rewards and environments read "
                "the latter"
            )
    return None


class _HeldOut:
    """The problems that evaluation asks, and which of them are trained on as well."""

    def __init__(self) -> None:
        self._asked: dict[str, list[tuple[str, str]]] = {}
        self._trained: dict[str, dict[str, str]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, problem: Problem, index: int, problems: Problems) -> None:
        self._asked.setdefault(problem.question, []).append((problems.source.key, problems.name(index)))
        self._counts[problems.source.key] += 1

    def meet(self, problem: Problem, index: int, problems: Problems) -> None:
        for key, name in self._asked.get(problem.question, ()):
            at = f"{name} = {problems.name(index)} of {problems.source.key}"
            self._trained.setdefault(key, {}).setdefault(name, at)

    def remarks(self) -> Iterator[str]:
        for key, found in self._trained.items():
            shown = ", ".join([*found.values()][:3]) + ", ..." * (len(found) > 3)
            count = self._counts[key]
            which = f"All {count}" if len(found) == count else f"{len(found)} of the {count}"
            which += f" evaluated problems of {key}"
            yield f"{which} are also trained on ({shown}): held-out accuracy is not held out"


class _Check:
    """Checks the problems of a source one at a time.

    after: number of tokens for which there must be room after a prompt. rewards: the reference answers must fit them;
    None: the answers themselves are trained on.
    """

    def __init__(
        self,
        problems: Problems,
        experiment: Experiment,
        tokenizer: PreTrainedTokenizerBase,
        after: int,
        rewards: RewardsSection | None,
        pictures: Sequence[str],
    ) -> None:
        self._pictures = pictures
        self._problems, self._experiment, self._tokenizer = problems, experiment, tokenizer
        self._key, self._after, self._rewards = problems.source.key, after, rewards
        check_template(tokenizer, problems.source)
        self._turn = len(prompt_ids(tokenizer, Problem("", "", chat_template=problems.source.chat_template)))
        self._rendered: set[object] = set()

    def __call__(self, problem: Problem, index: int) -> None:
        name = self._problems.name(index)
        texts = [str(message["content"]) for message in problem.conversation]
        if found := [token for token in self._pictures if any(token in text for text in texts)]:
            expected = "text: the positions of pictures (M-RoPE) are not implemented"
            remedy = f"Correct or remove {name}."
            raise user_error(f"{self._key}: {name}", f"{found[0]}, the place of a picture", expected, remedy)
        self._check_roles(problem, name)
        self._check_length(problem, name)
        for config in self._rewards.functions if self._rewards is not None else ():
            ours = BUILT_IN.get(config.function)
            if ours is not None and ours.reads is not None and not ours.reads(problem.answer):
                expected = f"{ours.reference}, as the reward {config.function} reads"
                remedy = f"Correct {name}, or name other rewards."
                raise user_error(f"{self._key}: {name}: answer", problem.answer, expected, remedy)

    def _check_roles(self, problem: Problem, name: str) -> None:
        """Render each form of conversation once: templates refuse some orders of turns and some forms of calls."""
        given, roles = problem.conversation, ("user", "assistant", "tool")  # whose texts may be long
        turns = [{**turn, "content": turn["content"] and "x"} if turn["role"] in roles else turn for turn in given]
        answer = "</think>x" if "</think>" in problem.answer else "x"
        form = (answer, *((turn["role"], _form(turn)) for turn in turns))
        if form in self._rendered:
            return
        self._rendered.add(form)
        shown = [turn["role"] for turn in given] + ["assistant"] * (self._rewards is None)
        try:
            with rendering():
                prompt_ids(self._tokenizer, replace(problem, messages=turns))
                if self._rewards is None:
                    answer_ids(self._tokenizer, turns, answer, problem.chat_template)
        except UserError as error:
            raise UserError(f"{self._key}: {name}: {error}") from error
        except Exception as error:  # whatever a program may raise
            found = f"turns of {', '.join(shown)}, at which the chat template fails: {error}"
            expected = "turns that the chat template of model.path renders"
            raise user_error(f"{self._key}: {name}", found, expected, f"Correct or remove {name}.") from error

    def _check_length(self, problem: Problem, name: str) -> None:
        """Check that a prompt and its answer (the data's if supervised, else max_new_tokens) fit the context length."""
        supervised, tokenizer = self._rewards is None, self._tokenizer
        limit = self._experiment.rollout.context_length
        room = limit - self._after
        turns = problem.conversation
        texts = [str(message["content"]) for message in turns] + [problem.answer] * supervised
        size = sum(len(text.encode()) for text in texts)
        # Calls, thoughts and names: a template may write all of them.
        further = [{name: turn[name] for name in turn.keys() - {"role", "content"}} for turn in turns]
        most = size + sum(len(json.dumps(message)) for message in further if message)
        if self._turn * len(turns) + TOKENS_PER_BYTE * most <= room:
            return
        tokens = fewest_tokens(tokenizer, size)
        if tokens <= room:
            tokens = len(prompt_ids(tokenizer, problem))
            if supervised:
                tokens += len(answer_ids(tokenizer, turns, problem.answer, problem.chat_template)) - 1
        if tokens > room:
            what = "question and answer" if supervised else "a prompt"
            rest = "the end of sequence" if supervised else f"an answer of max_new_tokens = {self._after}"
            found = f"{what} of {size} bytes, at least {tokens} tokens"
            expected = f"at most {room}, so that {rest} still fits rollout.context_length = {limit}"
            remedy = f"Raise rollout.context_length, or shorten or remove {name}."
            raise user_error(f"{self._key}: {name}", found, expected, remedy)


def _form(value: object) -> object:
    """Return names, types and emptiness of a nested value. A template renders values alike if these are equal."""
    if isinstance(value, dict):
        return tuple(sorted((name, _form(inner)) for name, inner in value.items()))
    if isinstance(value, list):
        return "list", *dict.fromkeys(map(_form, value))
    return type(value).__name__, bool(value)
