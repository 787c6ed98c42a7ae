"""Everything about a run that can be checked before a process is started.

:func:`check` raises one UserError with the key, the value found, the value expected and the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from models import Model, ModelSizes
from models.peft import START, read_adapter
from models.stored import check_stored
from numerics.backend.implementation import capability_of, deepgemm_lacks
from numerics.errors import user_error
from rl.experiment import Experiment
from rl.experiment.preconditions.algorithm import check_algorithm
from rl.experiment.preconditions.data import check_data
from rl.experiment.preconditions.model import check_architecture, check_model_layout, read_model
from rl.experiment.preconditions.resources import check_memory, check_port, check_shared_memory
from rl.experiment.preconditions.teacher import check_teacher
from rl.experiment.preconditions.tokenizer import check_chat_template, load_tokenizer, read_tokenizer
from rl.record.trackers import check_trackers
from rl.record.wandb_run import check_wandb
from rollout.environments.functions import load_environment
from rollout.named_functions import check_importable
from rollout.rewards.builtin import BUILT_IN
from rollout.rewards.config import RewardConfig
from rollout.rewards.functions import load_function
from rollout.speculation import check_drafts
from trainer.device import has_transformer_engine
from trainer.megatron.lowering import lower
from trainer.megatron.model_checks import check_packing, check_sharing
from trainer.megatron.optimizer_memory import lower_optimizer

__all__ = ["check", "read_model"]


def check(experiment: Experiment, say: Callable[[str], object] = lambda text: None) -> Model:
    """Check the spec against its model, its data and this machine; returns what was read of the model.

    say: told what the user should know and need not mend.

    Raises:
        UserError: the first thing that stands in the way.
    """
    if experiment.numerics.mode == "exact":
        _check_deepgemm(experiment)
    check_drafts(experiment.rollout.speculation, torch.cuda.is_available())
    check_algorithm(experiment)
    check_trackers(experiment.tracking.to)
    check_wandb(experiment.tracking.recorded_wandb)
    model = read_model(path := Path(experiment.model.path))
    check_architecture(model, experiment)
    check_model_layout(model.sizes, experiment)
    adapted = model.adapted(experiment.adapter)  # refuses what the model cannot have
    lowered = lower(experiment.numerics_config(), has_transformer_engine())
    held_in_fp8 = bool(lowered.ddp.get("fp8_param_gather"))
    lower_optimizer(experiment.trainer.optimizer, held_in_fp8, torch.cuda.is_available(), has_transformer_engine())
    check_packing(experiment.trainer.packing, experiment.numerics.mode, has_transformer_engine())
    check_sharing(experiment.trainer, experiment.numerics.mode, experiment.rollout.context_length)
    _check_context(model.sizes, experiment)
    tokenizer = read_tokenizer(path, model.sizes.vocab_size)
    check_data(experiment, tokenizer, say)
    check_stored(path, model, say=say)
    if experiment.adapter is not None and experiment.adapter.start is not None:
        read_adapter(Path(experiment.adapter.start), path, adapted, START)
    teacher = check_teacher(experiment, model.sizes, tokenizer)
    check_memory(adapted.shape, experiment, teacher)
    check_shared_memory(model.shape, experiment)
    if experiment.needs_engines:
        check_importable(experiment.environment.function, "environment.function")
        if experiment.environment.harness is not None and experiment.environment.harness.program is not None:
            check_importable(experiment.environment.harness.program, "environment.harness.program")
        load_environment(experiment.environment)
        for index, config in enumerate(experiment.rewards.functions):
            _check_reward(config, f"rewards.functions.{index}")
        for place, own in enumerate(experiment.eval.sets):
            for index, config in enumerate(own.rewards.functions if own.rewards else ()):
                _check_reward(config, f"eval.sets.{place}.rewards.functions.{index}")
        check_port(experiment.rollout)
    return model


def _check_reward(config: RewardConfig, key: str) -> None:
    """Whether the function is there, and a tokenizer that it needs."""
    check_importable(config.function, f"{key}.function")
    load_function(config, key)
    if config.function in BUILT_IN and (name := BUILT_IN[config.function].tokenizer):
        key, directory = f"{key}.kwargs.{name}", str(config.kwargs[name])
        check_chat_template(load_tokenizer(directory, key), directory, key)


def _check_deepgemm(experiment: Experiment) -> None:
    """Whether DeepGEMM, if it is asked for, is here; its bits are compared where it is to run. A cluster that is not
    ours knows its machines."""
    asked = experiment.numerics.deepgemm and "RAY_ADDRESS" not in os.environ
    if asked and (lacking := deepgemm_lacks(capability_of("cuda" if torch.cuda.is_available() else "cpu"))):
        raise user_error(
            "numerics.deepgemm",
            found=f"true, and no {lacking} here",
            expected="a Hopper GPU and DeepGEMM",
            remedy="Set numerics.deepgemm=false: products run on our kernels, with the same results.",
        )


def _check_context(sizes: ModelSizes, experiment: Experiment) -> None:
    rollout = experiment.rollout
    if rollout.context_length > sizes.max_positions:
        raise user_error(
            "rollout.context_length",
            found=rollout.context_length,
            expected=f"at most {sizes.max_positions}, the model's max_position_embeddings",
            remedy=f"Set rollout.context_length={sizes.max_positions} or less.",
        )
    if rollout.max_new_tokens >= rollout.context_length:
        raise user_error(
            "rollout.max_new_tokens",
            found=rollout.max_new_tokens,
            expected=f"less than rollout.context_length = {rollout.context_length}, which holds the prompt too",
            remedy="Lower rollout.max_new_tokens or raise rollout.context_length.",
        )
    if rollout.cache_tokens < rollout.row_tokens:
        behind = "" if rollout.speculation is None else f" and {rollout.speculation.reserve} tokens for drafts"
        raise user_error(
            "rollout.max_total_tokens",
            found=rollout.cache_tokens,
            expected=f"at least rollout.context_length = {rollout.context_length}{behind}",
            remedy="Raise rollout.max_total_tokens or lower rollout.context_length.",
        )
