"""Answers to rewards, beside whatever the engines and the trainer do meanwhile."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl.run.background import Background
from rl.run.teacher import Teacher
from rollout.rewards.builtin import BUILT_IN
from rollout.rewards.config import RewardsConfig
from rollout.rewards.functions import Parts, RewardFunction, RewardValueError, load_function
from rollout.rewards.workers import RewardFailure, Workers
from rollout.types import Prompt, Trajectory

REWARD_FAILURES = "rollout/reward_failures"


class RewardError(RuntimeError):
    """Reward functions have failed more often than a run allows."""


@dataclass(frozen=True)
class Judged:
    """What became of an answer.

    Attributes:
        text: without the stop token.
        reward: the weighted sum of the parts.
        parts: what each function said, unweighted: by its name, and `name/part` where it gave named numbers.
        teacher_logprobs: the teacher's, of each token; None where it was not asked.
    """

    text: str
    reward: float
    parts: Parts
    teacher_logprobs: list[float] | None = None


class Judge:
    """The reward functions of an experiment, and its teacher if it has one, asked as answers come in."""

    def __init__(
        self, config: RewardsConfig, tokenizer: PreTrainedTokenizerBase, teacher: Teacher | None = None
    ) -> None:
        self._config, self._tokenizer, self._teacher = config, tokenizer, teacher
        self._functions = [load_function(c, f"rewards.functions.{i}") for i, c in enumerate(config.functions)]
        self._workers = Workers(config.functions, config.workers)
        self._background = Background("rewards")
        self._failed = 0
        self._explained: set[str] = set()
        self._news: list[str] = []

    def begin(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], *, taught: bool = False
    ) -> Future[list[Judged]]:
        """The verdict on each answer to a prompt, in time, for `wait`. taught: ask the teacher too, if there is one."""
        if taught and self._teacher is not None:
            return self._background.begin(self._judged_and_scored(self._teacher, prompt, trajectories))
        return self._background.begin(self._judged(prompt, trajectories))

    def wait(self, verdict: Future[list[Judged]]) -> list[Judged]:
        """What was begun.

        Raises RewardError: functions fail too often, or one that is `async` never awaits; EngineError: no teacher is
        left.
        """
        patience = max(config.timeout_s for config in self._config.functions)
        while not futures.wait([verdict], patience).done:
            if not self._background.takes_turns():
                named = ", ".join(function.config.label for function in self._functions if function.is_async)
                raise RewardError(
                    f"found an async reward ({named}) that has kept all others from their turn for {patience:g} s, "
                    "expected functions that await what they wait for. Let it await, or make it a plain function"
                )
        return verdict.result()

    def failures(self) -> list[str]:
        """A text for each call that has failed since this was last asked: the traceback of a function's first one, and
        nothing for its others."""
        said, self._news = self._news, []
        return said

    def close(self) -> None:
        """End the processes; what is under way is given up. A second call does nothing."""
        self._workers.close()
        self._background.close()

    # The rest runs in the background.

    async def _judged_and_scored(
        self, teacher: Teacher, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[Judged]:
        judged, scores = await asyncio.gather(self._judged(prompt, trajectories), teacher.logprobs(trajectories))
        return [replace(each, teacher_logprobs=values) for each, values in zip(judged, scores, strict=True)]

    async def _judged(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judged]:
        texts = [self._tokenizer.decode(t.token_ids[:-1] if t.finished else t.token_ids) for t in trajectories]
        offered: list[dict[str, Any]] = [
            {
                "question": prompt.problem.question,
                "reference": prompt.problem.answer,
                "answer": text,
                "finished": trajectory.finished,
                "tokens": len(trajectory.token_ids),
            }
            for text, trajectory in zip(texts, trajectories, strict=True)
        ]
        said = await asyncio.gather(*(self._of_all(index, offered) for index in range(len(self._functions))))
        return [self._summed(text, [of_function[row] for of_function in said]) for row, text in enumerate(texts)]

    async def _of_all(self, index: int, offered: list[dict[str, Any]]) -> list[Parts | None]:
        """What one function says of each answer of a group; None where it failed."""
        if not self._functions[index].of_group:
            each = await asyncio.gather(*(self._called(index, one, 1) for one in offered))
            return [None if parts is None else parts[0] for parts in each]
        together = offered[0] | {name: [one[name] for one in offered] for name in ("finished", "tokens")}
        together["answers"] = [one["answer"] for one in offered]
        parts = await self._called(index, together, len(offered))
        return [None] * len(offered) if parts is None else [*parts]

    async def _called(self, index: int, offered: dict[str, Any], answers: int) -> list[Parts] | None:
        function = self._functions[index]
        seconds = function.config.timeout_s
        try:
            if function.is_async:
                return function.parts(await asyncio.wait_for(function(offered), seconds), answers)
            if function.config.function in BUILT_IN and BUILT_IN[function.config.function].cheap:
                return function.parts(function(offered), answers)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._workers.threads, self._workers.call, index, offered, answers, seconds
            )
        except TimeoutError:
            self._fail(function, f"it took more than {seconds:g} s")
        except (RewardFailure, RewardValueError) as error:
            self._fail(function, str(error))
        except Exception:  # of a user's function
            self._fail(function, traceback.format_exc())
        return None

    def _fail(self, function: RewardFunction, why: str) -> None:
        self._failed += 1
        label, first = function.config.label, function.config.label not in self._explained
        self._explained.add(label)
        self._news.append(f"the reward {label} has failed, which counts as 0: {why.rstrip()}" if first else "")
        if self._failed > self._config.max_failures:
            raise RewardError(
                f"found {self._failed} calls of reward functions that failed, expected at most "
                f"{self._config.max_failures} (rewards.max_failures). The last one, {label}: {why.rstrip()}"
            )

    def _summed(self, text: str, said: list[Parts | None]) -> Judged:
        parts, reward = {}, 0.0
        for function, of_function in zip(self._functions, said):
            for name, value in (of_function or {}).items():
                parts[f"{function.config.label}/{name}" if name else function.config.label] = value
                reward += function.config.weight * value
        return Judged(text, reward, parts)
