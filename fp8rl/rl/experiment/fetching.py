"""Fetches the models and data sets of the Hugging Face hub that an experiment names, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from fp8rl.models.hub import Kind, commit, is_hub_name
from fp8rl.rl.experiment.experiment import Experiment, TeacherSection
from fp8rl.rl.experiment.sections import DataSource, EvalSet, ModelSection, TrainSource

Named = ModelSection | TeacherSection | DataSource
T = TypeVar("T", ModelSection, TeacherSection, TrainSource, EvalSet, DataSource)


def fetched(experiment: Experiment, before: Experiment | None = None) -> Experiment:
    """Fetch what an experiment names of the hub, and return the experiment with a commit as the revision of each.

    before: the experiment of a run that is resumed. What names no revision stays at the commit that it had there.

    Raises:
        UserError: the hub does not give one; see :mod:`models.hub`.
    """
    commits: dict[tuple[Kind, str, str | None], str] = {}
    for kind, section in _hub_named(before) if before is not None else ():
        if section.revision is not None:
            commits[kind, section.path, None] = section.revision

    def pinned(section: T, kind: Kind, key: str) -> T:
        if not is_hub_name(section.path):
            return section
        asked = kind, section.path, section.revision
        if asked not in commits:
            commits[asked] = commit(section.path, section.revision, kind, key)
        return section.model_copy(update={"revision": commits[asked]})

    data, teacher = experiment.data, experiment.teacher
    train = tuple(pinned(own, "dataset", data.train_key(place)) for place, own in enumerate(data.train))
    held_out = None if data.eval is None else pinned(data.eval, "dataset", "data.eval")
    sets = tuple(pinned(own, "dataset", f"eval.sets.{place}") for place, own in enumerate(experiment.eval.sets))
    found = experiment.model_copy(
        update={
            "model": pinned(experiment.model, "model", "model.path"),
            "teacher": None if teacher is None else pinned(teacher, "model", "teacher.path"),
            "data": data.model_copy(update={"train": train, "eval": held_out}),
            "eval": experiment.eval.model_copy(update={"sets": sets}),
        }
    )
    for model in (found.model, found.teacher):
        if model is not None:
            model.directory  # noqa: B018 - fetches it
    for key, source in _data_sources(found):
        found.data.source(source, key)
    return found


def _data_sources(experiment: Experiment) -> Iterator[tuple[str, DataSource]]:
    data = experiment.data
    yield from ((data.train_key(place), own) for place, own in enumerate(data.train))
    if data.eval is not None:
        yield "data.eval", data.eval
    yield from ((f"eval.sets.{place}", own) for place, own in enumerate(experiment.eval.sets))


def _hub_named(experiment: Experiment) -> Iterator[tuple[Kind, Named]]:
    yield "model", experiment.model
    if experiment.teacher is not None:
        yield "model", experiment.teacher
    for _, source in _data_sources(experiment):
        yield "dataset", source
