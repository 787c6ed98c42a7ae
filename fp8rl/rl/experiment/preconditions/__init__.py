"""Checks a run before any process is started.

:func:`check` raises one UserError with the key, the value found, the value expected and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fp8rl.models import Model
from fp8rl.models.checkpoint.peft import START, read_adapter
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.data import check_data
from fp8rl.rl.experiment.preconditions.model import (
    check_algorithm,
    check_architecture,
    check_teacher,
    read_model,
    unused_rates,
)
from fp8rl.rl.experiment.preconditions.resources import check_memory, check_port, check_shared_memory
from fp8rl.rl.experiment.preconditions.rules import Target, check_target
from fp8rl.rl.experiment.preconditions.tokenizer import check_chat_template, load_tokenizer, read_tokenizer
from fp8rl.rl.experiment.validation import expected_of
from fp8rl.rl.record.trackers import check_trackers
from fp8rl.rl.record.trackers.to_wandb import check_wandb
from fp8rl.rollout.tasks.environments.functions import load_environment
from fp8rl.rollout.tasks.rewards import RewardSection, load_function
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN

__all__ = ["check", "read_model"]


def check(experiment: Experiment, say: Callable[[str], object] = lambda text: None) -> Model:
    """Check the spec against its model, its data and this machine; return the model that was read.

    say: prints remarks for the user, who need not act on them.
    Raises UserError: for the first rule that the run breaks.
    """
    check_algorithm(experiment.algorithm)
    for remark in unused_rates(experiment):
        say(remark)
    if "working_dir_files" in (folder := Path(experiment.run.dir).resolve()).parts:  # `ray job submit --working-dir`
        say(
            f"run.dir: {folder} is in Ray's copy of the submitted folder. Ray removes this copy and the run in it some "
            "time after the job. Set run.dir to a folder that stays"
        )
    check_trackers(experiment.tracking.recorded)
    if "wandb" in experiment.tracking.recorded:
        check_wandb(experiment.tracking.wandb)
    model = read_model(path := experiment.model.directory)
    check_architecture(model, experiment)
    check_target(experiment, model.shape, Target.here())
    adapted = model.adapted(experiment.adapter)  # refuses what the model cannot have
    tokenizer = read_tokenizer(path, model.sizes.vocab_size)
    pictures = tokenizer.convert_ids_to_tokens([each for each in model.sizes.picture_tokens if each < len(tokenizer)])
    check_data(experiment, tokenizer, say, pictures)
    check_stored(path, model, say=say)
    if experiment.adapter is not None and experiment.adapter.start is not None:
        read_adapter(Path(experiment.adapter.start), path, adapted, START)
    teacher = check_teacher(experiment, model.sizes, tokenizer)
    check_memory(adapted.shape, experiment, teacher)
    check_shared_memory(experiment)
    if experiment.needs_engines:
        check_functions(experiment)
        check_port(experiment.rollout)
    return model


# Checks that the functions of a spec exist and take their arguments, and that built-in ones take their values.


def check_functions(experiment: Experiment) -> None:
    """Check the environment and every reward function. Raises UserError: a function or its tokenizer is missing, or it
    cannot be called with its `kwargs`."""
    load_environment(experiment.environment)
    for index, config in enumerate(experiment.rewards.functions):
        _check_reward(config, f"rewards.functions.{index}")
    for place, eval_set in enumerate(experiment.eval.sets):
        for index, config in enumerate(eval_set.rewards.functions if eval_set.rewards else ()):
            _check_reward(config, f"eval.sets.{place}.rewards.functions.{index}")


def _check_reward(config: RewardSection, key: str) -> None:
    """Load a reward function. Check a built-in one's `kwargs` against its annotations, and its tokenizer."""
    function = load_function(config, key)
    if config.function not in BUILT_IN:
        return
    hints = get_type_hints(function.call, include_extras=True)
    for name, value in config.kwargs.items():
        try:
            TypeAdapter(hints[name], config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            detail = error.errors()[0]
            expected = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else expected_of(detail)
            place = ".".join([f"{key}.kwargs.{name}", *(str(part) for part in detail["loc"] if isinstance(part, int))])
            raise user_error(place, found=detail["input"], expected=expected, remedy=f"Correct {place}.") from None
    if name := BUILT_IN[config.function].tokenizer:
        key, directory = f"{key}.kwargs.{name}", config.kwargs[name]
        check_chat_template(load_tokenizer(directory, key), directory, key)
