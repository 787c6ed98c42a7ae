"""The subject of a plan: a spec, the directory of a model, or the name of a config that comes with the project."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8rl.models import load_architecture, read_shape
from fp8rl.models.hub import model_directory
from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.reading import check_path
from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.experiment.budget.job import Gpu, Job, job_of, teacher_bytes
from fp8rl.rl.experiment.loading import architecture_of, compose_experiment
from fp8rl.trainer.state_bytes import storage_on_gpus

CONFIGS = Path(__file__).parent / "configs"
"""Packaged directories with only the config.json of a public model."""
NAMES = sorted(each.name for each in CONFIGS.iterdir())
LONGEST = 8192
"""A model without a spec is planned with rows of this many tokens, or with its number of positions if that is less."""


@dataclass(frozen=True)
class PlanSubject:
    """A model, and the experiment that it is planned in."""

    name: str
    """The name that the command was given."""
    shape: Shape
    experiment: Experiment
    chosen: bool
    """True if the user gave the trainer's layout. Otherwise the plan chooses it."""
    engines_chosen: bool = True
    """True if the user gave an engine's number of ranks. Otherwise the plan chooses it."""
    stands_in: str = ""
    """The packaged config that the plan uses because the spec's model is not there yet."""
    assumed: str = ""
    """Assumptions about a model without a spec, in words."""
    teacher: Shape | None = None
    """The shape of the spec's teacher; the policy's shape if the teacher does not exist yet."""


def read_plan_subject(subject: str | None, overrides: Sequence[str] = ()) -> PlanSubject:
    """Read the spec or model to plan. Raises UserError: there is none, or a key or value of the spec is wrong."""
    path = Path(subject := subject or "")
    check_path(path, "SPEC|MODEL")
    if path.is_file():
        experiment = load_experiment(path, overrides)
        directory, stands_in = _config(experiment.model.path, experiment.model.revision, "model.path")
        if not directory.exists():
            raise _unknown("model.path", str(directory), directory.name, "the directory of a model")
        teacher, shape = None, read_shape(directory, adapter=experiment.adapter)
        if (section := experiment.teacher) is not None:
            directory, _ = _config(section.path, section.revision, "teacher.path")
            teacher = read_shape(directory, "teacher.path") if directory.exists() else shape
        return PlanSubject(subject, shape, experiment, chosen=True, stands_in=stands_in, teacher=teacher)
    packaged = "" if path.exists() else _packaged(subject) or _packaged(path.name)
    if not packaged:
        path = model_directory(subject, None, "SPEC|MODEL", config_only=True)
    if not subject or not (packaged or path.is_dir()):
        raise _unknown("SPEC|MODEL", subject, path.name, "an existing YAML spec, a Hugging Face directory")
    directory = CONFIGS / packaged if packaged else path
    if (architecture := architecture_of(overrides)) is not None:
        load_architecture(architecture)
    shape = read_shape(directory, "MODEL")
    length = min(LONGEST, shape.sizes.max_positions)
    values = {
        "model": {"path": str(directory)},
        "data": {"train": "-"},
        "eval": {"problems": 0},
        "rollout": {"context_length": length, "max_new_tokens": length // 2, "max_total_tokens": 8 * length},
        "trainer": {"micro_batch_tokens": length},
    }
    chosen = any(key.startswith(f"trainer.{name}=") for key in overrides for name in ("tp", "pp", "ep", "dp", "cp"))
    engines_chosen = any(key.startswith("rollout.tp=") for key in overrides)
    experiment = compose_experiment(values, overrides)
    numerics, rollout = experiment.numerics, experiment.rollout
    assumed = (
        f"assumed without a spec: {experiment.algorithm.name}, {rollout.prompts_per_step} prompts of "
        f"{rollout.group_size} answers a step, rows of {rollout.context_length:,} tokens, {numerics.mode} mode in "
        f"{numerics.preset}, {rollout.engines} engine(s) on the trainer's GPUs. Any key may follow as key=value"
    )
    return PlanSubject(subject, shape, experiment, chosen, engines_chosen, assumed=assumed)


def job_on(subject: PlanSubject, gpu: Gpu, length: int | None = None) -> Job:
    """Return the subject's job on such GPUs, with the teacher that engines' GPUs hold. length: tokens of a row."""
    experiment = subject.experiment
    storage = storage_on_gpus(experiment.numerics_config(), transformer_engine=True)
    job = job_of(experiment, subject.shape, storage, gpu.memory, length)
    if subject.teacher is None:
        return job
    return replace(job, teacher=teacher_bytes(experiment, subject.teacher, gpu.memory))


def is_apart(experiment: Experiment, job: Job) -> bool:
    """Return whether engines have their own GPUs, because the transport needs that or an engine has several ranks."""
    return experiment.sync.engines_own_gpus or not job.engines or job.engine_tp > 1


def _config(path: str, revision: str | None, key: str) -> tuple[Path, str]:
    """Return a directory with a model's config, and the packaged config's name if it stands in for a missing model."""
    if not Path(path).exists() and (packaged := _packaged(Path(path).name)):
        return CONFIGS / packaged, packaged
    return model_directory(path, revision, key, config_only=True), ""


def _packaged(name: str) -> str:
    """Return a model's packaged config by its name, also in its publisher's spelling (`Qwen3-30B-A3B`); "" if none."""
    plain = _plain(name)
    return plain if plain in NAMES else ""


def _unknown(key: str, found: str, name: str, expected: str) -> UserError:
    plain = _plain(name)
    longer = [each for each in NAMES if plain and each.startswith(plain)]
    close = longer or difflib.get_close_matches(plain, NAMES, n=1, cutoff=0.4)
    meant = f"Did you mean {close[0]}? " if close else ""
    return user_error(key, found, f"{expected}, or one of {', '.join(NAMES)}", f"{meant}Correct the name.")


def _plain(name: str) -> str:
    return name.lower().translate(str.maketrans("-.", "__"))
