"""What a plan is asked for: a spec, the directory of a model, or the name of a config that comes with the project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import rl
from models import read_shape
from models.shape import Shape
from numerics.errors import user_error
from rl.experiment import Experiment, load_experiment
from rl.experiment.loading import compose_experiment

CONFIGS = Path(rl.__file__).parents[1] / "examples/models/configs"
"""Directories with nothing but a config.json, of models that anyone can download."""
LONGEST = 8192
"""Tokens of a row that a model without a spec is planned for, unless its positions end before."""

Assumed = Literal["recompute", "offload", "sleep", "bf16_moments"]
"""What the trainer has no key for and a plan may assume: a layer's activations computed again in the backward; masters
and moments on the host; trainer and engine of one GPU leave it to each other in turns; Adam's moments in BF16."""


@dataclass(frozen=True)
class Subject:
    """A model, and the experiment that it is planned in.

    Attributes:
        name: as it was given. shape: of the model.
        chosen: whether somebody said how the trainer is laid out; else the plan chooses. engines_chosen: likewise how
            many ranks an engine has.
    """

    name: str
    shape: Shape
    experiment: Experiment
    chosen: bool
    engines_chosen: bool = True


def read_subject(subject: str | None, overrides: Sequence[str] = ()) -> Subject:
    """Raises UserError: there is no such thing, or a key or value of it is wrong."""
    path = Path(subject := subject or "")
    if path.is_file():
        experiment = load_experiment(path, overrides)
        return Subject(subject, read_shape(Path(experiment.model.path)), experiment, chosen=True)
    directory = CONFIGS / subject if not path.exists() and (CONFIGS / subject / "config.json").is_file() else path
    if not subject or not directory.is_dir():
        known = ", ".join(sorted(each.name for each in CONFIGS.iterdir())) if CONFIGS.is_dir() else "none"
        raise user_error(
            "SPEC|MODEL",
            found=subject,
            expected=f"a YAML spec, a Hugging Face directory, or one of {known}",
            remedy="Correct the name.",
        )
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


def read_assumed(text: str | None) -> frozenset[Assumed]:
    """Of a list with commas. Raises UserError for what nothing assumes."""
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in get_args(Assumed):
            raise user_error(
                "--assume", found=name, expected=f"some of {', '.join(get_args(Assumed))}", remedy="Correct the name."
            )
    return frozenset(name for name in get_args(Assumed) if name in names)
