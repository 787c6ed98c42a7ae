"""Attribution of a run that is over, or of a capsule: a trainer of one rank and an engine are started for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from numerics.config import NumericsConfig
from numerics.errors import user_error
from rl.attribution.attribute import Pair, attribute
from rl.attribution.result import Attribution
from rl.guard.capsule import read_capsule
from rl.guard.standing import Standing
from rl.preflight.calibration import ANSWERS, calibration_prompts
from rl.run_dir import RunDir
from rl.sides import Sides, open_sides
from rl.spec import ExperimentSpec, read_resolved_spec
from trainer.batch import TokenBatch
from trainer.config import TrainerConfig


@dataclass(frozen=True)
class Subject:
    """What is attributed.

    name: of the run or capsule. page: where its result is written. spec: with the model directory to start from.
    numerics: that were in force. checkpoint: whose weights are loaded over those of the directory, if any.
    batch: None if it is still to be sampled.
    """

    name: str
    page: Path
    spec: ExperimentSpec
    numerics: NumericsConfig
    checkpoint: Path | None = None
    batch: TokenBatch | None = None


def read_subject(path: Path) -> Subject:
    """A run directory or a capsule.

    Raises:
        UserError: it is neither, it has no weights, or it is damaged.
    """
    path = Path(path).absolute()
    if (path / "capsule.json").is_file():
        return _capsule(path)
    run = RunDir(path)
    if not run.spec.is_file():
        raise user_error(
            "attribute",
            found=str(path),
            expected="the directory of a run or of a capsule",
            remedy="Give for example runs/demo, or runs/demo/capsules/step_7.",
        )
    return _run(run)


def attribute_offline(subject: Subject, *, quick: bool, say: Callable[[str], object]) -> Attribution:
    """Start both sides and attribute; everything started ends with the call.

    A run's batch is sampled anew: problems of its data, at its temperature, from its last weights. quick: leave out the
    causes that take another trainer and engine to switch, in native mode.

    Raises:
        UserError: what both sides refuse at their start.
    """
    say(f"attribute {subject.name}: starting the engine and the trainer")
    with _sides(subject, subject.numerics) as sides:
        batch = subject.batch
        if batch is None:
            say("sampling a calibration batch")
            batch = sides.sample(calibration_prompts(sides), ANSWERS, sides.spec.rollout.temperature)
        say("comparing op by op, then one cause at a time")
        (endpoint,) = sides.pool.endpoints()
        return attribute(
            sides.trainer,
            endpoint,
            batch,
            subject.numerics,
            resync=sides.sync,
            other_pair=None if quick else partial(_pair, subject),
        )


def _run(run: RunDir) -> Subject:
    spec = read_resolved_spec(run.spec)
    step = max(run.checkpoint_steps(), default=None)
    if step is None and run.model.is_dir():
        spec = _with_model(spec, run.model)
    elif step is None:
        raise user_error(
            "attribute",
            found=f"{run.path} with neither model/ nor a checkpoint",
            expected="weights to compare",
            remedy="Let the run reach its first checkpoint, or attribute one of its capsules.",
        )
    numerics = Standing.of_checkpoint(run, step).numerics(spec.numerics_config())
    checkpoint = None if step is None else run.checkpoint(step)
    return Subject(run.name, run.path / "attribution.html", spec, numerics, checkpoint)


def _capsule(path: Path) -> Subject:
    capsule = read_capsule(path)
    if capsule.weights is None:
        raise user_error(
            "attribute",
            found=f"{path} without weights",
            expected="a capsule with its weights",
            remedy="Set guard.capsule_weights=true in runs to come, or attribute the run.",
        )
    spec = _with_model(capsule.spec, capsule.weights)
    # Beside the capsule, whose files are sealed.
    page = path.with_name(f"{path.name}.attribution.html")
    return Subject(f"{spec.run.name} {path.name}", page, spec, capsule.numerics, batch=capsule.evidence.batch)


def _with_model(spec: ExperimentSpec, path: Path) -> ExperimentSpec:
    return spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(path)})})


@contextmanager
def _pair(subject: Subject, numerics: NumericsConfig) -> Iterator[Pair]:
    with _sides(subject, numerics) as sides:
        (endpoint,) = sides.pool.endpoints()
        yield sides.trainer, endpoint


@contextmanager
def _sides(subject: Subject, numerics: NumericsConfig) -> Iterator[Sides]:
    """One engine and a trainer of one rank with the subject's weights.

    `numerics.k_splits` stays that of the run, so that one rank adds in the order of the run's layout.
    """
    one_rank = TrainerConfig(micro_batch_tokens=subject.spec.trainer.micro_batch_tokens)
    spec = subject.spec.model_copy(update={"trainer": one_rank})
    with open_sides(spec, numerics) as sides:
        if subject.checkpoint is not None:
            sides.trainer.load(subject.checkpoint)
            sides.sync()
        yield sides
