"""The audit of a run's precision: start both sides, watch one training step op by op, ask the engine, and hold what was
seen against the precision map."""

from __future__ import annotations

import time
from collections.abc import Callable

from fp8rl.diagnose.audit.audit_report import AuditReport, Deviation, differences_of, rows_of
from fp8rl.diagnose.audit.observations import Observation, engine_sightings
from fp8rl.diagnose.audit.watch import watch_step
from fp8rl.diagnose.measure import ANSWERS, calibration_prompts, check_has_engine, sampled_batch, sync_weights
from fp8rl.models import Model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions import check, read_model
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rl.run.stack import Stack, open_pair
from fp8rl.rollout.types import HandshakeError
from fp8rl.trainer.step.batch import TokenBatch


def audit(experiment: Experiment, *, say: Callable[[str], None] = print) -> AuditReport:
    """Hold what a spec's trainer and engine compute, hold and send against the precision map of its numerics.

    Args:
        say: told what is going on.

    Raises:
        UserError: no run of the spec could start, or its sync fails.
    """
    began, numerics = time.monotonic(), experiment.numerics_config()
    model = read_model(experiment.model.directory).adapted(engine_adapter(experiment))
    check(experiment)
    check_has_engine(experiment)
    seen: list[Observation] = []
    tokens, refused = 0, []
    try:
        with open_pair(experiment, say=say) as stack:
            tokens, seen = examine(stack, model, numerics, say)
    except HandshakeError as error:
        refused = [refused_engine(error)]
    return AuditReport(
        spec_digest=numerics.spec.digest(),
        mode=numerics.mode,
        trainer=numerics.trainer,
        rollout=numerics.rollout,
        rows=rows_of(seen),
        differences=[*refused, *differences_of(seen)],
        tokens=tokens,
        seconds=time.monotonic() - began,
    )


def examine(
    stack: Stack, model: Model, numerics: NumericsConfig, say: Callable[[str], None]
) -> tuple[int, list[Observation]]:
    """Return the tokens of the step, and all that was seen. The trainer has learnt from it; its engine holds the
    weights from before."""
    say("syncing the weights")
    sync_weights(stack)
    say("sampling answers and learning from them, uncompiled")
    batch = sampled_batch(stack, calibration_prompts(stack), ANSWERS, stack.experiment.rollout.temperature)
    holdings = stack.engines.ask(lambda client: client.inventory())
    with stack.turn("train"):
        seen = trainer_sightings(stack, batch, numerics)
    for held in holdings:
        seen += engine_sightings(held, model, numerics)
    return int(batch.real_tokens().sum()), seen


def trainer_sightings(stack: Stack, batch: TokenBatch, numerics: NumericsConfig) -> list[Observation]:
    """Sightings of all ranks in one step.

    The loss is the likelihood of the answers: it needs no rewards, and no precision depends on it.
    """
    planned = numerics, stack.experiment.trainer
    ranks: list[list[Observation]] = stack.trainer.apply(watch_step, batch, SftObjective.of(batch), *planned)
    stack.trainer.weight_version += 1  # of the update, which its ranks made by themselves
    return [sighting for rank in ranks for sighting in rank]


def refused_engine(error: HandshakeError) -> Deviation:
    """An engine that said at its start that it runs something else."""
    return Deviation(
        key="engine",
        names=["handshake"],
        planned="an engine that runs what the experiment says",
        found=str(error),
        why="Nothing was sampled, and no step was watched.",
        remedy="Start the engine from this spec, in this environment.",
    )
