"""The preflight from top to bottom: what needs no process, then same spec, same bytes, same logprobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fp8rl.diagnose.calibration import ANSWERS, calibration_prompts, check_has_engine, sampled_batch
from fp8rl.diagnose.difference import Difference
from fp8rl.diagnose.preflight import same_logprobs, same_spec
from fp8rl.diagnose.preflight.preflight_report import Check, PreflightReport
from fp8rl.diagnose.preflight.same_spec import Observed, block_alignment, observe, same_precision
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions import check, read_model
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rl.run.stack import Stack, open_pair
from fp8rl.rollout.errors import HandshakeError
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.manifest import SyncError

BF16 = "BF16 on both sides"


@dataclass
class SoFar:
    """The findings of a preflight so far; see `PreflightReport`."""

    checks: list[Check] = field(default_factory=list)
    quantized: dict[str, list[str]] = field(default_factory=lambda: {"trainer": [], "engine": []})
    differences: dict[str, Difference] = field(default_factory=dict)


def preflight(experiment: Experiment, *, quick: bool = False, say: Callable[[str], None] = print) -> PreflightReport:
    """Check the three agreements of a spec.

    Args:
        quick: leave out BF16/BF16, which needs another engine.
        say: told what is going on.

    Raises:
        UserError: the spec's model, data or sizes are such that no run could start.
    """
    began = time.monotonic()
    if quick and experiment.numerics.mode == "native":
        raise user_error(
            "--quick",
            found="numerics.mode=native",
            expected="exact: native mode is judged beside BF16/BF16, which --quick leaves out",
            remedy="Leave --quick out.",
        )
    so_far = SoFar()
    path = experiment.model.directory
    model = read_model(path)
    so_far.checks += [block_alignment(model.shape, experiment), same_precision(experiment)]
    if not so_far.checks[0].ok:
        check_stored(path, model)  # which `check` does too
    else:
        check(experiment)
        check_has_engine(experiment)
        try:
            with open_pair(experiment, say=say) as stack:
                _examine(stack, so_far, quick, say)
        except HandshakeError as error:
            so_far.checks.append(same_spec.refused_handshake(error))
    numerics = experiment.numerics_config()
    return PreflightReport(
        spec_digest=numerics.spec.digest(),
        mode=numerics.mode,
        trainer=numerics.trainer,
        rollout=numerics.rollout,
        checks=so_far.checks,
        quantized=so_far.quantized,
        differences=so_far.differences,
        seconds=time.monotonic() - began,
    )


def _examine(stack: Stack, so_far: SoFar, quick: bool, say: Callable[[str], None]) -> None:
    say("syncing the weights")
    try:
        so_far.checks.append(same_spec.manifest_of(stack.syncing.sync()))
    except SyncError as error:
        so_far.checks.append(same_spec.refused_sync(error))
        return  # generation stays paused
    say("sampling and scoring the calibration batch")
    prompts = calibration_prompts(stack)
    batch = sampled_batch(stack, prompts, ANSWERS, stack.experiment.rollout.temperature)
    _examine_spec(stack, batch, so_far)
    _examine_logprobs(stack, batch, so_far, quick, say)


def _examine_spec(stack: Stack, batch: TokenBatch, so_far: SoFar) -> None:
    numerics, architecture = stack.numerics, stack.experiment.model.architecture
    report = stack.engines.ask(lambda client: client.report())
    manifest = stack.engines.ask(lambda client: client.manifest()).entries
    observed: list[Observed] = stack.trainer.apply(observe, batch)
    so_far.quantized = {
        "trainer": sorted({name for rank in observed for name in rank.quantized}),
        "engine": same_spec.quantized_names(manifest),
    }
    so_far.checks += [
        same_spec.handshake(numerics, engine_adapter(stack.experiment), report, architecture),
        same_spec.quantized_modules(**so_far.quantized),
        same_spec.kv_cache_dtype(report),
    ]
    if numerics.rollout_spec.quantized:
        scales = same_spec.served_scales(stack.syncing.bridge.write_checkpoint(), manifest)
        names = same_spec.scale_names(manifest)
        so_far.checks.append(same_spec.scale_formats(scales, names, numerics.rollout_spec.weight.scale))
    routers = [pair for rank in observed for pair in rank.routers]
    if routers:
        so_far.checks.append(same_spec.router_precision(numerics.mode, routers, report.provides))


def _examine_logprobs(stack: Stack, batch: TokenBatch, so_far: SoFar, quick: bool, say: Callable[[str], None]) -> None:
    numerics, differences = stack.numerics, so_far.differences
    measured = differences["trainer against engine"] = same_logprobs.against_trainer(stack, batch)
    temperature = same_logprobs.sampler_temperature(stack, batch, measured)

    prompts = calibration_prompts(stack)
    plain = batch if batch.temperature == 1.0 else sampled_batch(stack, prompts, ANSWERS, 1.0)
    floors = {
        "prefill against decode": same_logprobs.prefill_against_decode(stack, plain),
        "alone against together": same_logprobs.alone_against_together(stack, plain),
    }
    if not quick and (numerics.trainer, numerics.rollout) != ("bf16", "bf16"):
        say("starting a BF16 engine for the noise floor")
        floors[BF16] = same_logprobs.bf16_on_both_sides(stack, prompts, ANSWERS)
    differences |= floors
    so_far.checks += [
        same_logprobs.trainer_against_engine(numerics, measured, floors.get(BF16)),
        temperature,
        *same_logprobs.noise_floor(numerics.mode, floors),
    ]
