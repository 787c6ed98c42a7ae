"""Fetches what a spec names from the Hugging Face hub before anything starts, and digests the files that it names.

A resumed run compares the digests of data, of a user's functions and programs, and of models. Files of data and code
are hashed whole, as a stream. Of a large file of weights the size, the header and pieces at equal distances are hashed.
This is enough, because training changes every piece.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeVar

from fp8rl.models.hub import Kind, commit, is_hub_name
from fp8rl.numerics.core.reading import open_regular
from fp8rl.rl.experiment.experiment import Experiment, TeacherSection, with_keys
from fp8rl.rl.experiment.sections import DataSource, EvalSet, ModelSection, TrainSource
from fp8rl.rollout.tasks.environments import HarnessSection
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN

SAMPLED_BEYOND = 64 << 20
"""Size in bytes up to which a file of weights is hashed whole."""
_PIECES, _PIECE = 64, 1 << 20
_COMPILED = b"\x7fELF"
_OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Endings of weights, configuration, tokenizer and chat template; other files of a model's directory are not read."""


@dataclass(frozen=True)
class Content:
    """The files that one key of a spec named."""

    said: str
    """The value of the key."""
    digest: str
    """SHA-256 of the files, its first 32 hex digits."""


def contents(experiment: Experiment) -> dict[str, Content]:
    """Digest the files that each key names. Missing files, and files that the run does not read, are left out."""
    importlib.invalidate_caches()  # finders remember the directories that they have looked at
    files = {key: (value, [*named]) for key, value, named in _named(experiment)}
    return {key: Content(value, _digest(named)) for key, (value, named) in files.items() if named}


def _named(experiment: Experiment) -> Iterator[tuple[str, str, Iterator[Path]]]:
    """Yield (key, its value, its files) for each key that names files."""
    environment, sets = experiment.environment, experiment.eval.sets if experiment.eval.problems else ()
    for source in experiment.data.training:
        yield source.key, str(source.path), _below(source.path)
    if (held_out := experiment.data.eval) is not None and experiment.eval.problems:
        yield "data.eval", held_out.path, _below(held_out.path)
    for index, own in enumerate(sets):
        yield f"eval.sets.{index}", own.path, _below(own.path)
    yield "model.path", experiment.model.path, _of_a_model(experiment.model.directory)
    if (file := experiment.model.architecture) is not None:
        yield "model.architecture", file, _below(file)
    if experiment.teacher is not None:
        yield "teacher.path", experiment.teacher.path, _of_a_model(experiment.teacher.directory)
    yield "algorithm.name", experiment.algorithm.name, _sources(experiment.algorithm.name)
    if not experiment.needs_engines:
        return
    yield from _judges(experiment.rewards, "rewards")
    for index, own in enumerate(sets):
        if own.rewards is not None:
            yield from _judges(own.rewards, f"eval.sets.{index}.rewards")
    yield "environment.function", environment.function, _sources(environment.function)
    if (harness := environment.harness) is not None:
        if harness.program is not None:
            yield "environment.harness.program", harness.program, _sources(harness.program)
        yield "environment.harness.command", " ".join(harness.command), _programs(harness)


def _judges(rewards: RewardsSection, key: str) -> Iterator[tuple[str, str, Iterator[Path]]]:
    for index, config in enumerate(rewards.functions):
        name = f"{key}.functions.{index}"
        yield f"{name}.function", config.function, _sources(config.function)
        ours = BUILT_IN.get(config.function)
        if ours is not None and ours.tokenizer and isinstance(path := config.kwargs.get(ours.tokenizer), str):
            yield f"{name}.kwargs.{ours.tokenizer}", path, _of_a_model(path)


def _below(named: str | Path) -> Iterator[Path]:
    """Yield the file, or the files of a directory, without hidden files and without caches of `datasets`."""
    path = Path(named)
    if path.is_file():
        yield path
    for directory, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            if not name.startswith(".") and not fnmatch(name, "cache-*.arrow"):
                yield Path(directory, name)


def _of_a_model(path: str | Path) -> Iterator[Path]:
    return (file for file in sorted(Path(path).glob("*")) if file.suffix in _OF_A_MODEL and file.is_file())


def _sources(name: str) -> Iterator[Path]:
    """Yield the file of a user's function or class (its name has a colon); a built-in name has none."""
    module, colon, _ = name.rpartition(":")
    if colon:
        file = Path(module) if module.endswith(".py") else _module_file(module, [os.getcwd(), *sys.path])
        if file is not None and file.is_file():
            yield file.absolute()


def _programs(harness: HarnessSection) -> Iterator[Path]:
    """Yield the files in a command, and the module after `-m`, but no compiled programs such as the interpreter."""
    directory = Path(harness.directory or "").absolute()
    for before, argument in zip(("", *harness.command), harness.command, strict=False):
        file = _module_file(argument, [str(directory)]) if before == "-m" else directory / argument
        if file is not None and os.path.isfile(file):  # pathlib raises on a long text
            with open_regular(file) as opened:
                compiled = opened.read(len(_COMPILED)) == _COMPILED
            if not compiled:
                yield file


def _module_file(name: str, places: list[str]) -> Path | None:
    """Find the file of a module by its dotted name, without importing its parent packages."""
    for part in name.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    file = spec.origin if spec is not None else None
    return Path(file) if file is not None and file.endswith(".py") else None


def _digest(files: list[Path]) -> str:
    """Return one digest of all files. If there are several, it covers their names in their common folder, too."""
    root = os.path.commonpath([file.parent.absolute() for file in files])
    total = hashlib.sha256()
    for name, file in sorted((os.path.relpath(file, root), file) for file in files):
        total.update(name.encode("utf-8", "surrogateescape") + b"\0" if len(files) > 1 else b"")
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if file.suffix != ".safetensors" or size <= SAMPLED_BEYOND:
                own = hashlib.file_digest(opened, "sha256")
            else:
                own = hashlib.sha256(str(size).encode())
                for index in range(_PIECES):
                    opened.seek((size - _PIECE) * index // (_PIECES - 1))
                    own.update(opened.read(_PIECE))
        total.update(own.digest())
    return total.hexdigest()[:32]


T = TypeVar("T", ModelSection, TeacherSection, TrainSource, EvalSet, DataSource)


def fetched(experiment: Experiment, before: Experiment | None = None) -> Experiment:
    """Fetch the hub's models and data sets that an experiment names. Return it with a commit as each revision.

    before: the experiment of a run that is resumed. What has no revision now gets the commit that it has there.
    Raises UserError: the hub does not give a model or data set; see :mod:`models.hub`.
    """
    commits: dict[tuple[Kind, str, str | None], str] = {}
    if before is not None:
        models = [model for model in (before.model, before.teacher) if model is not None]
        commits |= {("model", model.path, None): model.revision for model in models if model.revision is not None}
        sources = [source for _, source in _data_sources(before)]
        commits |= {("dataset", one.path, None): one.revision for one in sources if one.revision is not None}

    def pinned(section: T, kind: Kind, key: str) -> T:
        if not is_hub_name(section.path):
            return section
        asked = kind, section.path, section.revision
        if asked not in commits:
            commits[asked] = commit(section.path, section.revision, kind, key)
        return section.model_copy(update={"revision": commits[asked]})

    data, teacher = experiment.data, experiment.teacher
    train = tuple(pinned(one, "dataset", data.train_key(place)) for place, one in enumerate(data.train))
    held_out = None if data.eval is None else pinned(data.eval, "dataset", "data.eval")
    sets = tuple(pinned(one, "dataset", f"eval.sets.{place}") for place, one in enumerate(experiment.eval.sets))
    found = with_keys(
        experiment,
        {
            "model": pinned(experiment.model, "model", "model.path"),
            "teacher": None if teacher is None else pinned(teacher, "model", "teacher.path"),
            "data.train": train,
            "data.eval": held_out,
            "eval.sets": sets,
        },
    )
    for model in (found.model, found.teacher):
        if model is not None:
            model.directory  # noqa: B018 - fetches it
    for key, source in _data_sources(found):
        found.data.source(source, key)
    return found


def _data_sources(experiment: Experiment) -> Iterator[tuple[str, DataSource]]:
    data = experiment.data
    yield from ((data.train_key(place), source) for place, source in enumerate(data.train))
    if data.eval is not None:
        yield "data.eval", data.eval
    yield from ((f"eval.sets.{place}", eval_set) for place, eval_set in enumerate(experiment.eval.sets))
