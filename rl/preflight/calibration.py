"""The batch on which log-probabilities are compared: the spec's own problems, and prompts long enough to strain."""

from __future__ import annotations

from rl.problems import of_step
from rl.sides import Sides
from rollout.tasks import load_problems, prompt_ids
from rollout.types import Prompt

PROBLEMS = 16
ANSWERS = 2
LONG_PROMPTS = 4
LONG_TOKENS = 320
"""Beyond two key splits of the attention, where an order of summation shows that short prompts never reach."""


def calibration_prompts(sides: Sides) -> list[Prompt]:
    """The problems of the run's first step, at most PROBLEMS, and LONG_PROMPTS made of several of them in a row."""
    spec = sides.spec
    drawn = of_step(load_problems(spec.data.train, "data.train"), 1, PROBLEMS, spec.run.seed)
    prompts = [Prompt(problem, prompt_ids(sides.tokenizer, problem.question)) for problem in drawn]
    room = spec.rollout.context_length - spec.rollout.max_new_tokens - 1
    return prompts + [_long(prompts[index:] + prompts[:index], min(LONG_TOKENS, room)) for index in range(LONG_PROMPTS)]


def _long(prompts: list[Prompt], tokens: int) -> Prompt:
    """Prompts in a row, over and over, cut to `tokens` at their beginning."""
    row = [token for prompt in prompts for token in prompt.token_ids]
    repeated = row * -(-tokens // len(row))
    return Prompt(prompts[-1].problem, repeated[-tokens:])
