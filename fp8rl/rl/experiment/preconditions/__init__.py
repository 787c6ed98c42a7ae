"""Everything about a run that can be checked before a process is started.

:func:`check` raises one UserError with the key, the value found, the value expected and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8rl.models import Model
from fp8rl.models.checkpoint.peft import START, read_adapter
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.data import check_data
from fp8rl.rl.experiment.preconditions.functions import check_functions
from fp8rl.rl.experiment.preconditions.model import (
    check_algorithm,
    check_architecture,
    check_teacher,
    read_model,
    unused_rates,
)
from fp8rl.rl.experiment.preconditions.resources import check_memory, check_port, check_shared_memory
from fp8rl.rl.experiment.preconditions.rules import Target, check_target
from fp8rl.rl.experiment.preconditions.tokenizer import read_tokenizer
from fp8rl.rl.record.trackers import check_trackers
from fp8rl.rl.record.trackers.to_wandb import check_wandb

__all__ = ["check", "read_model"]


def check(experiment: Experiment, say: Callable[[str], object] = lambda text: None) -> Model:
    """Check the spec against its model, its data and this machine; returns what was read of the model.

    say: told what the user should know and need not mend.

    Raises:
        UserError: the first thing that stands in the way.
    """
    check_algorithm(experiment.algorithm)
    for remark in unused_rates(experiment):
        say(remark)
    if "working_dir_files" in (folder := Path(experiment.run.dir).resolve()).parts:  # `ray job submit --working-dir`
        say(
            f"run.dir: {folder} is in Ray's copy of the submitted folder, which Ray removes, with the run, some time "
            "after the job. Set run.dir to a folder that stays"
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
    check_shared_memory(model.shape, experiment)
    if experiment.needs_engines:
        check_functions(experiment)
        check_port(experiment.rollout)
    return model
