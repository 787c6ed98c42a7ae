"""Attribution of a run that is over, or of a capsule: a trainer of one rank and an engine are started for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fp8rl.diagnose.attribution.attribute import Pair, attribute
from fp8rl.diagnose.attribution.attribution_report import Attribution
from fp8rl.diagnose.calibration import ANSWERS, LONG_PROMPTS, LONG_TOKENS, calibration_prompts, sampled_batch
from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.reading import check_path
from fp8rl.rl.experiment import Experiment, read_resolved
from fp8rl.rl.guard.capsule import read_capsule
from fp8rl.rl.guard.gates import GateState
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.stack import Stack, open_pair
from fp8rl.rollout.environments.config import EnvironmentSection
from fp8rl.rollout.rewards.functions import RewardsSection
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import TokenBatch


@dataclass(frozen=True)
class AttributionSubject:
    """The run or capsule that is attributed, and its weights, numerics and batch."""

    name: str
    page: Path
    """The file that its result is written to."""
    experiment: Experiment
    """With the model directory to start from."""
    numerics: NumericsConfig
    """Those that were in force."""
    checkpoint: Path | None = None
    """Its weights are loaded over those of the directory."""
    batch: TokenBatch | None = None
    """None if it is still to be sampled."""

    @property
    def compared(self) -> str:
        """Return why |d| of the batch is not that of the run, if it is sampled anew."""
        if self.batch is not None:
            return ""
        return (
            "Sampled for this attribution, at the current weights: answers to problems of the run, and to "
            f"{LONG_PROMPTS} prompts of up to {LONG_TOKENS} tokens made of several of them. Attention over more tokens "
            "merges more splits, so in native mode |d| grows with the length: compare it with the run's only at short "
            "positions."
        )


def read_subject(path: Path) -> AttributionSubject:
    """A run directory or a capsule.

    Raises:
        UserError: it is neither, it has no weights, or it is damaged.
    """
    check_path(path, "attribute")
    path = Path(path).absolute()
    if (path / "capsule.json").is_file():
        return _capsule(path)
    run = RunDir(path)
    if not run.experiment.is_file():
        raise user_error(
            "attribute",
            found=str(path),
            expected="the directory of a run or of a capsule",
            remedy="Give for example runs/demo, or runs/demo/capsules/step_7.",
        )
    return _run(run)


def attribute_offline(subject: AttributionSubject, *, quick: bool, say: Callable[[str], object]) -> Attribution:
    """Start both sides and attribute; everything started ends with the call.

    A run's batch is sampled anew: problems of its data, at its temperature, from its last weights. quick: leave out the
    causes that take another trainer and engine to switch, in native mode.

    Raises:
        UserError: what both sides refuse at their start.
    """
    say(f"attribute {subject.name}")
    with _stack_of(subject, subject.numerics, say) as stack:
        batch = subject.batch
        if batch is None:
            say("sampling a calibration batch")
            batch = sampled_batch(stack, calibration_prompts(stack), ANSWERS, stack.experiment.rollout.temperature)
        say("comparing op by op, then one cause at a time")
        (endpoint,) = stack.engines.up()
        return attribute(
            stack.trainer,
            endpoint,
            batch,
            subject.numerics,
            read_model(subject.experiment.model.directory),
            resync=stack.syncing.sync,
            other_pair=None if quick else partial(_pair, subject, say),
        )


def _run(run: RunDir) -> AttributionSubject:
    experiment = read_resolved(run.experiment)
    step = max(run.checkpoint_steps(), default=None)
    if step is None and run.model.is_dir():
        model = experiment.model.model_copy(update={"path": str(run.model)})
        experiment = experiment.model_copy(update={"model": model})
    elif step is None:
        raise user_error(
            "attribute",
            found=f"{run.path} with neither model/ nor a checkpoint",
            expected="weights to compare",
            remedy="Let the run reach its first checkpoint, or attribute one of its capsules.",
        )
    numerics = GateState.of_checkpoint(run, step).numerics(experiment.numerics_config())
    checkpoint = None if step is None else run.checkpoint(step)
    return AttributionSubject(run.name, run.path / "attribution.html", experiment, numerics, checkpoint)


def _capsule(path: Path) -> AttributionSubject:
    capsule = read_capsule(path)
    if capsule.weights is None:
        raise user_error(
            "attribute",
            found=f"{path} without weights",
            expected="a capsule with its weights",
            remedy="Set guard.capsule_weights=true in runs to come, or attribute the run.",
        )
    experiment = capsule.beginning(capsule.weights)
    # Beside the capsule, whose files are sealed.
    page = path.with_name(f"{path.name}.attribution.html")
    return AttributionSubject(
        f"{experiment.run.name} {path.name}", page, experiment, capsule.numerics, batch=capsule.scored.batch
    )


@contextmanager
def _pair(subject: AttributionSubject, say: Callable[[str], object], numerics: NumericsConfig) -> Iterator[Pair]:
    with _stack_of(subject, numerics, say) as stack:
        (endpoint,) = stack.engines.up()
        yield stack.trainer, endpoint


@contextmanager
def _stack_of(subject: AttributionSubject, numerics: NumericsConfig, say: Callable[[str], object]) -> Iterator[Stack]:
    """An engine and a trainer of one rank each with the subject's weights.

    `numerics.k_splits` stays that of the run, so that one rank adds in the order of the run's layout. Nothing is judged
    and nobody converses, so that no code is imported which the subject names.
    """
    trainer = TrainerSection(micro_batch_tokens=subject.experiment.trainer.micro_batch_tokens)
    rollout = subject.experiment.rollout.model_copy(update={"tp": 1})
    plain = {"rewards": RewardsSection(), "environment": EnvironmentSection()}
    experiment = subject.experiment.model_copy(update={"trainer": trainer, "rollout": rollout, **plain})
    with open_pair(experiment, numerics, say) as stack:
        if subject.checkpoint is not None:
            with stack.turn("train"):
                stack.trainer.load(subject.checkpoint)
            stack.syncing.sync()
        yield stack
