"""What a plan is asked for: a spec, the directory of a model, or the name of a config that comes with the project."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models import load_architecture, read_shape
from models.shape import Shape
from numerics.errors import UserError, user_error
from numerics.io.reading import check_path
from rl.experiment import Experiment, load_experiment
from rl.experiment.loading import architecture_of, compose_experiment
from rollout.speculation import check_drafts

CONFIGS = Path(__file__).parent / "configs"
"""Directories with nothing but a config.json, of models that anyone can download; part of the package."""
LONGEST = 8192
"""Tokens of a row that a model without a spec is planned for, unless its positions end before."""


@dataclass(frozen=True)
class Subject:
    """A model, and the experiment that it is planned in.

    Attributes:
        name: as it was given. shape: of the model.
        chosen: whether somebody said how the trainer is laid out; else the plan chooses. engines_chosen: likewise how
            many ranks an engine has.
        teacher: shape of the spec's teacher; the policy's where nobody has made it yet.
        stands_in: name of the packaged config that is planned with, because the spec's model is not there yet.
    """

    name: str
    shape: Shape
    experiment: Experiment
    chosen: bool
    engines_chosen: bool = True
    stands_in: str = ""
    teacher: Shape | None = None


def read_subject(subject: str | None, overrides: Sequence[str] = ()) -> Subject:
    """What is to be planned.

    Raises:
        UserError: there is no such thing, or a key or value of it is wrong.
    """
    path = Path(subject := subject or "")
    check_path(path, "SPEC|MODEL")
    if path.is_file():
        experiment = load_experiment(path, overrides)
        check_drafts(experiment.rollout.speculation, cuda=True)
        directory = Path(experiment.model.path)
        stands_in = "" if directory.exists() else _packaged(directory.name)
        if not directory.exists() and not stands_in:
            raise _unknown("model.path", str(directory), directory.name, "the directory of a model")
        shape = read_shape(CONFIGS / stands_in if stands_in else directory, adapter=experiment.adapter)
        teacher = _teacher(experiment, shape)
        return Subject(subject, shape, experiment, chosen=True, stands_in=stands_in, teacher=teacher)
    packaged = "" if path.exists() else _packaged(subject)
    if not subject or not (packaged or path.is_dir()):
        raise _unknown("SPEC|MODEL", subject, path.name, "a YAML spec, a Hugging Face directory")
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
    chosen = any(key.startswith(f"trainer.{name}=") for key in overrides for name in ("tp", "pp", "ep", "dp"))
    engines_chosen = any(key.startswith("rollout.tp=") for key in overrides)
    return Subject(subject, shape, compose_experiment(values, overrides, directory), chosen, engines_chosen)


def _teacher(experiment: Experiment, policy: Shape) -> Shape | None:
    if experiment.teacher is None:
        return None
    directory = Path(experiment.teacher.path)
    if directory.exists():
        return read_shape(directory, "teacher.path")
    packaged = _packaged(directory.name)
    return read_shape(CONFIGS / packaged) if packaged else policy


def _packaged(name: str) -> str:
    """The packaged config of a model's name, also as its publisher writes it (`Qwen3-30B-A3B`); "" if there is none."""
    plain = _plain(name)
    return plain if plain in _names() else ""


def _names() -> list[str]:
    return sorted(each.name for each in CONFIGS.iterdir())


def _unknown(key: str, found: str, name: str, expected: str) -> UserError:
    plain = _plain(name)
    longer = [each for each in _names() if plain and each.startswith(plain)]
    close = longer or difflib.get_close_matches(plain, _names(), n=1, cutoff=0.4)
    meant = f"Did you mean {close[0]}? " if close else ""
    return user_error(
        key, found=found, expected=f"{expected}, or one of {', '.join(_names())}", remedy=f"{meant}Correct the name."
    )


def _plain(name: str) -> str:
    return name.lower().translate(str.maketrans("-.", "__"))
