"""Judges answers by the reward functions, in the background of sampling and training."""

from __future__ import annotations

import asyncio
import copy
import math
import traceback
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fp8rl.rl.run.background import Background
from fp8rl.rl.run.events import REWARD_FAILURES, Events, Failures
from fp8rl.rollout.deadlines import within
from fp8rl.rollout.tasks.environments.conversation import Said, transcript
from fp8rl.rollout.tasks.named_functions import Numbers, ReturnError, is_finite
from fp8rl.rollout.tasks.rewards import EACH, RewardsSection, load_function
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN
from fp8rl.rollout.tasks.rewards.workers import RewardFailure, Workers
from fp8rl.rollout.types import EngineError, Problem, Prompt, Trajectory

if TYPE_CHECKING:
    from fp8rl.rl.run.engines.engines import Engines

_LOOK_SECONDS = 1.0
"""Interval at which a wait looks whether an `async` function blocks all others."""


@dataclass(frozen=True)
class JudgedAnswer:
    """A sampled answer and its reward."""

    problem: Problem
    trajectory: Trajectory
    said: list[Said]
    """The turns of the answer: (model or environment, text)."""
    reward: float
    """The weighted sum of the parts."""
    parts: Numbers
    """Unweighted values of the functions: by a function's name, and as `name/part` if it returned named numbers."""
    teacher_logprobs: list[float] | None = None
    """The teacher's log-probability of each token; None if the teacher was not asked."""

    @property
    def text(self) -> str:
        """The text of all turns, without the stop token."""
        return "".join(text for _, text in self.said)


class Judge:
    """Has answers judged as they come in, by the experiment's reward functions and its teacher, if it has one."""

    def __init__(
        self,
        config: RewardsSection,
        tokenizer: PreTrainedTokenizerBase,
        key: str = "rewards",
        teacher: Engines | None = None,
        events: Events | None = None,
    ) -> None:
        """key: the functions' key in the spec. teacher: scores tokens, at temperature 1. events: gets failures."""
        self._config, self._tokenizer, self._teacher = config, tokenizer, teacher
        self._functions = [load_function(c, f"{key}.functions.{i}") for i, c in enumerate(config.functions)]
        self._workers = Workers(config.functions, config.workers)
        self._background = Background("rewards")
        self.failures = Failures(
            "reward",
            "which counts as 0",
            REWARD_FAILURES,
            f"{key}.max_failures",
            config.max_failures,
            events or Events(),
        )

    def without_teacher(self) -> Judge:
        """Return this judge without its teacher, with the same processes, for answers that are not trained on."""
        judge = copy.copy(self)
        judge._teacher = None
        return judge

    def begin(
        self, prompt: Prompt, answers: Sequence[Trajectory] | Future[list[Trajectory]]
    ) -> Future[list[JudgedAnswer]]:
        """Judge the answers to a prompt, once they are there. `wait` takes the future, and raises their errors."""
        return self._background.begin(self._judged(prompt, answers))

    def wait(self, verdict: Future[list[JudgedAnswer]]) -> list[JudgedAnswer]:
        """Wait for the verdicts of `begin` and return them.

        Raises BlockedError: an `async` function never awaits; TooManyFailuresError; EngineError: no teacher is left, or
        the teacher finds a value that is not finite.
        """
        while not futures.wait([verdict], _LOOK_SECONDS).done:
            self.check()
        return verdict.result()

    def check(self) -> None:
        """Raise BlockedError if an `async` function never awaits. Called from time to time during a wait."""
        named = ", ".join(function.config.label for function in self._functions if function.is_async)
        longest = max(config.timeout_s for config in self._config.functions)
        remedy = "Let it await, or make it a plain function"
        self._background.check(longest, "rewards.functions.N.timeout_s", f"an async reward ({named})", remedy)

    def close(self) -> None:
        """End the processes and give up the calls that are under way. A second call does nothing."""
        self._workers.close()
        self._background.close()

    # The rest runs in the background.

    async def _judged(
        self, prompt: Prompt, answers: Sequence[Trajectory] | Future[list[Trajectory]]
    ) -> list[JudgedAnswer]:
        """Judge the answers, in their order. An answer whose environment failed gets reward 0; no function sees it."""
        if isinstance(answers, Future):
            answers = await asyncio.wrap_future(answers)
        transcripts = [transcript(answer, self._tokenizer) for answer in answers]
        offered = [
            arguments(prompt.problem, said, len(answer.logprobs), answer.finished, answer.outcome)
            for said, answer in zip(transcripts, answers, strict=True)
            if not answer.failed
        ]
        functions = range(len(self._functions) if offered else 0)
        found, taught = await asyncio.gather(
            asyncio.gather(*(self._of_all(index, offered) for index in functions)), self._taught(answers)
        )
        values = zip(*found)  # by answer
        return [
            JudgedAnswer(prompt.problem, answer, said, *self._summed(() if answer.failed else next(values)), logprobs)
            for answer, said, logprobs in zip(answers, transcripts, taught, strict=True)
        ]

    async def _taught(self, answers: Sequence[Trajectory]) -> Sequence[list[float] | None]:
        """Return the teacher's log-probability of each token of each answer; None without a teacher."""
        if self._teacher is None:
            return [None] * len(answers)
        sequences = [answer.prompt_ids + answer.token_ids for answer in answers]
        scores = await asyncio.wrap_future(self._teacher.score(sequences))
        found = [score[len(answer.prompt_ids) - 1 :] for answer, score in zip(answers, scores, strict=True)]
        if bad := sum(not math.isfinite(value) for values in found for value in values):
            raise EngineError(
                f"found {bad} log-probabilities of the teacher that are not finite, expected numbers. Check the "
                "weights of teacher.path"
            )
        return found

    async def _of_all(self, index: int, offered: list[dict[str, Any]]) -> list[Numbers | None]:
        """Return one function's values for each answer of a group; None where the function failed."""
        if not self._functions[index].of_group:
            each = await asyncio.gather(*(self._called(index, one, 1) for one in offered))
            return [None if parts is None else parts[0] for parts in each]
        parts = await self._called(index, of_group(offered), len(offered))
        return [None] * len(offered) if parts is None else [*parts]

    async def _called(self, index: int, offered: dict[str, Any], answers: int) -> list[Numbers] | None:
        function = self._functions[index]
        seconds = function.config.timeout_s
        asked = copy.deepcopy(function.asked(offered))  # the function may change its arguments
        try:
            if function.is_async:
                return function.parts(await within(seconds, function(asked)), answers)
            if function.config.function in BUILT_IN and BUILT_IN[function.config.function].cheap:
                return function.parts(function(asked), answers)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._workers.threads, self._workers.call, index, asked, answers, seconds)
        except TimeoutError:
            self.failures.add(function.config.label, f"it took more than {seconds:g} s")
        except (RewardFailure, ReturnError) as error:
            self.failures.add(function.config.label, str(error))
        except Exception:  # of a user's function
            self.failures.add(function.config.label, traceback.format_exc())
        return None

    def _summed(self, verdicts: Sequence[Numbers | None]) -> tuple[float, Numbers]:
        """Return reward and parts of one answer, from the values of each function."""
        parts, reward = {}, 0.0
        for function, of_function in zip(self._functions, verdicts):
            for name, value in (of_function or {}).items():
                parts[f"{function.config.label}/{name}" if name else function.config.label] = value
                reward += function.config.weight * value
        if not is_finite(reward):
            self.failures.add("sum", f"found {reward} of {parts}, expected a finite number in FP32. Lower the weights")
            reward = 0.0
        return reward, parts


def arguments(
    problem: Problem, said: list[Said], tokens: int, finished: bool = True, outcome: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return all arguments that a function may ask for about one answer (`rollout.tasks.rewards`)."""
    return {
        "question": problem.question,
        "reference": problem.answer,
        "fields": problem.fields,
        "answer": "".join(text for _, text in said),
        "finished": finished,
        "tokens": tokens,
        "turns": said,
        "outcome": outcome or {},
    }


def of_group(offered: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments about all answers of a group. offered: those about each answer."""
    each = {name: [one[name] for one in offered] for name in EACH}
    return offered[0] | each | {"answers": [one["answer"] for one in offered]}
