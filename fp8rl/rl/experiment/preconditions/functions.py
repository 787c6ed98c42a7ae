"""The functions that a spec names: they are there, they take what they are given, and ours take these values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.tokenizer import check_chat_template, load_tokenizer
from fp8rl.rl.experiment.validation import expected_of
from fp8rl.rollout.tasks.environments.functions import load_environment
from fp8rl.rollout.tasks.rewards import RewardSection, load_function
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN


def check_functions(experiment: Experiment) -> None:
    """Check the environment and every reward function.

    Raises:
        UserError: one is missing, or cannot be called with its `kwargs`; or a tokenizer that it needs is missing.
    """
    load_environment(experiment.environment)
    for index, config in enumerate(experiment.rewards.functions):
        _check_reward(config, f"rewards.functions.{index}")
    for place, own in enumerate(experiment.eval.sets):
        for index, config in enumerate(own.rewards.functions if own.rewards else ()):
            _check_reward(config, f"eval.sets.{place}.rewards.functions.{index}")


def _check_reward(config: RewardSection, key: str) -> None:
    function = load_function(config, key)
    if config.function not in BUILT_IN:
        return
    check_values(function.call, config.kwargs, f"{key}.kwargs")
    if name := BUILT_IN[config.function].tokenizer:
        key, directory = f"{key}.kwargs.{name}", config.kwargs[name]
        check_chat_template(load_tokenizer(directory, key), directory, key)


def check_values(function: Callable[..., Any], kwargs: Mapping[str, Any], key: str) -> None:
    """Check values by the annotations of the parameters that they are for.

    Raises:
        UserError: naming one below `key`: it has another type, or is out of bounds.
    """
    hints = get_type_hints(function, include_extras=True)
    for name, value in kwargs.items():
        try:
            TypeAdapter(hints[name], config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            detail = error.errors()[0]
            expected = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else expected_of(detail)
            place = ".".join([f"{key}.{name}", *(str(part) for part in detail["loc"] if isinstance(part, int))])
            raise user_error(place, found=detail["input"], expected=expected, remedy=f"Correct {place}.") from None
