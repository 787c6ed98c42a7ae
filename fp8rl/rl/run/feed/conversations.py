"""Runs an experiment's environment: conversations between the engines' model and the environment."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from fp8rl.rl.run.background import Background, end_all
from fp8rl.rl.run.events import ENVIRONMENT_FAILURES, Events, Failures
from fp8rl.rollout.deadlines import GRACE_S
from fp8rl.rollout.tasks.environments import EnvironmentSection
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.functions import load_environment
from fp8rl.rollout.tasks.environments.harness import Harness
from fp8rl.rollout.tasks.named_functions import Numbers, ReturnError, brief, named_numbers
from fp8rl.rollout.types import EngineError, Group, SamplingParams, StaleWeightsError, Trajectory

REWARD = "reward"
"""The name of an environment's result, if it returns one number without a name."""

Ask = Callable[[Group, SamplingParams, int, object], "Future[list[Trajectory]]"]
"""Has engines answer a group; see `Engines.admit`."""


class Conversations:
    """The environment of an experiment. It has a conversation for each answer that is under way.

    The conversations take turns in a thread of their own, during sampling and training.
    """

    def __init__(
        self,
        config: EnvironmentSection,
        tokenizer: PreTrainedTokenizerBase,
        ask: Ask,
        longest: int | None = None,
        events: Events | None = None,
    ) -> None:
        """longest: most tokens of a row that the engines take. events: gets failures."""
        self._longest = longest
        self._config, self._tokenizer, self._ask = config, tokenizer, ask
        self._environment = load_environment(config)
        self._background = Background("environments")
        self.failures = Failures(
            "environment",
            "so that nothing is learnt from its answer",
            ENVIRONMENT_FAILURES,
            "environment.max_failures",
            config.max_failures,
            events or Events(),
            at_once=True,
        )

    def begin(self, group: Group, sampling: SamplingParams, oldest: int) -> Future[list[Trajectory]]:
        """Begin a conversation for each answer. The future gives the rows of all, in order; see `Engines.admit`."""
        return self._background.begin(self._group(group, sampling, oldest))

    def check(self) -> None:
        """Raise BlockedError if an environment never awaits. Called from time to time during a wait."""
        remedy = "Use asyncio.sleep, asyncio.to_thread or a subprocess of asyncio in it"
        what = f"an environment ({self._config.label})"
        self._background.check(self._config.timeout_s, "environment.timeout_s", what, remedy)

    def close(self) -> None:
        """Give up the conversations that are under way. A second call does nothing."""
        if isinstance(self._environment, Harness) and not self._background.closed:
            with suppress(TimeoutError):  # of an environment that never awaits; the rest ends with this process
                self._background.run(end_all(), 2 * GRACE_S)  # else a request under way would delay the next line
                self._background.run(self._environment.close(), GRACE_S)
        self._background.close()

    # The rest runs in the background.

    async def _group(self, group: Group, sampling: SamplingParams, oldest: int) -> list[Trajectory]:
        answers = await asyncio.gather(*(self._answer(group, seed, sampling, oldest) for seed in group.seeds))
        return [row for rows in answers for row in rows]

    async def _answer(self, group: Group, seed: int, sampling: SamplingParams, oldest: int) -> list[Trajectory]:
        async def sample(turn: Group, bounded: SamplingParams) -> Trajectory:
            # Later turns go to the engine that has the earlier ones in its cache.
            (answer,) = await asyncio.wrap_future(self._ask(turn, bounded, oldest, conversation))
            return answer

        conversation = Conversation(
            group.prompt, seed, sampling, sample, self._tokenizer, self._config.timeout_s, self._longest
        )
        try:
            outcome = _outcome(await conversation.run(self._environment))
            if not conversation.turns:
                raise ReturnError("it ended before the model's first turn, expected it to call sample()")
        except (EngineError, StaleWeightsError):
            raise
        except TimeoutError:
            why = f"it took more than {self._config.timeout_s:g} s between two turns (environment.timeout_s)"
        except ReturnError as error:
            why = str(error)
        except Exception:  # of a user's function
            why = traceback.format_exc()
        else:
            self.failures.succeeded()
            return conversation.trajectories(outcome)
        self.failures.add(self._config.label, why)
        return conversation.trajectories({}, failed=True)[:1]


def _outcome(returned: object) -> Numbers:
    if returned is None:
        return {}
    try:
        return {name or REWARD: value for name, value in named_numbers(returned).items()}
    except ReturnError:
        raise ReturnError(
            f"it returned {brief(returned)}, expected nothing, a number or named numbers, finite in FP32; text is "
            "added to an answer only by sample() and tell()"
        ) from None
