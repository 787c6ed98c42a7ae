"""Attribution finds the source of a mismatch of trainer and engine: by op, by cause, by expert and by position.

For a run that is over, or a capsule, trainer and engine are started here; `attribute` asks a pair that is live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8rl.diagnose.attribution.attribute import attribute, check_exact
from fp8rl.diagnose.attribution.attribution_report import Attribution
from fp8rl.diagnose.measure import ANSWERS, LONG_PROMPTS, LONG_TOKENS, calibration_prompts, sampled_batch, sync_weights
from fp8rl.diagnose.subject import Subject
from fp8rl.models import read_model
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rl.run.run import Run, open_pair
from fp8rl.rollout.tasks.environments import EnvironmentSection
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.trainer.config import TrainerSection


def page_of(subject: Subject) -> Path:
    """The page of a run lies in its folder, that of a capsule beside it, as its files are sealed."""
    path = subject.path
    return path / "attribution.html" if subject.batch is None else path.with_name(f"{path.name}.attribution.html")


def compared(subject: Subject) -> str:
    """Return why |d| of a batch that is sampled anew differs from |d| of the run. A given batch needs no such text."""
    if subject.batch is not None:
        return ""
    return (
        "Sampled for this attribution, at the current weights: answers to problems of the run, and to "
        f"{LONG_PROMPTS} prompts of up to {LONG_TOKENS} tokens made of several of them."
    )


def attribute_offline(subject: Subject, *, say: Callable[[str], object]) -> Attribution:
    """Start both sides and attribute; everything started ends with the call.

    A run's batch is sampled anew: problems of its data, at its temperature, from its last weights.

    Raises:
        UserError: the numerics are native; or what both sides refuse at their start, or a sync.
    """
    check_exact(subject.numerics)
    say(f"attribute {subject.name}")
    with _stack_of(subject, say) as stack:
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
            read_model(subject.experiment.model.directory).adapted(engine_adapter(subject.experiment)),
            wrong=subject.wrong,
        )


@contextmanager
def _stack_of(subject: Subject, say: Callable[[str], object]) -> Iterator[Run]:
    """An engine and a trainer of one rank each with the subject's weights.

    `numerics.k_splits` stays that of the run, so that one rank adds in the order of the run's layout. Nothing is judged
    and nobody converses, so that no code is imported which the subject names.
    """
    trainer = TrainerSection(micro_batch_tokens=subject.experiment.trainer.micro_batch_tokens)
    rollout = subject.experiment.rollout.model_copy(update={"tp": 1})
    plain = {"rewards": RewardsSection(), "environment": EnvironmentSection()}
    experiment = subject.experiment.model_copy(update={"trainer": trainer, "rollout": rollout, **plain})
    with open_pair(experiment, subject.numerics, say) as stack:
        if subject.checkpoint is not None:
            with stack.turn("train"):
                stack.trainer.load(subject.checkpoint)
        else:
            stack.trainer.weight_version = subject.version
        sync_weights(stack)
        yield stack
