"""The batch on which both sides are compared: the experiment's own problems, and prompts long enough to strain."""

from __future__ import annotations

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.sampling import EVERY_TOKEN
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.feed.batching import batch_from_trajectories
from fp8rl.rl.run.feed.feed import to_groups, to_prompts
from fp8rl.rl.run.feed.problems import training_problems
from fp8rl.rl.run.stack import Stack
from fp8rl.rollout.types import Prompt
from fp8rl.trainer.step.batch import TokenBatch

PROBLEMS = 16
ANSWERS = 2
LONG_PROMPTS = 4
LONG_TOKENS = 320
"""Beyond two key splits of the attention, where an order of summation shows that short prompts never reach."""


def calibration_prompts(stack: Stack) -> list[Prompt]:
    """The problems of the run's first step, at most PROBLEMS, and LONG_PROMPTS made of several of them in a row."""
    experiment = stack.experiment
    prompts = to_prompts(stack.tokenizer, training_problems(experiment).of_step(1, PROBLEMS))
    room = experiment.rollout.context_length - experiment.rollout.max_new_tokens - 1
    return prompts + [_long(prompts[index:] + prompts[:index], min(LONG_TOKENS, room)) for index in range(LONG_PROMPTS)]


def sampled_batch(stack: Stack, prompts: list[Prompt], group_size: int, temperature: float) -> TokenBatch:
    """`group_size` answers to each prompt, as a step would batch them, without advantages."""
    groups = to_groups(prompts, group_size, run_seed=stack.experiment.run.seed, step=0)
    answers = stack.sampling.sample(groups, temperature)
    truncation = stack.experiment.rollout.truncation if temperature else EVERY_TOKEN
    return batch_from_trajectories(answers, temperature, replay=stack.replays, truncation=truncation)


def check_has_engine(experiment: Experiment) -> None:
    """Raise `UserError` for an experiment that samples nothing."""
    if not experiment.needs_engines:
        raise user_error(
            "algorithm.name",
            found="sft with eval.problems = 0",
            expected="a run with an engine: there is nothing for its trainer to agree with",
            remedy="Train it as it is, or set eval.problems.",
        )


def _long(prompts: list[Prompt], tokens: int) -> Prompt:
    """Prompts in a row, over and over, cut to `tokens` at their beginning."""
    row = [token for prompt in prompts for token in prompt.token_ids]
    repeated = row * -(-tokens // len(row))
    return Prompt(prompts[-1].problem, repeated[-tokens:])
