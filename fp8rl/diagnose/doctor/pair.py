"""Starts both sides of a spec once, and compares spec, bytes, log-probabilities, and the format of every tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8rl.diagnose.doctor import agreement, logprobs
from fp8rl.diagnose.doctor.agreement import AGREEMENTS, Observed
from fp8rl.diagnose.doctor.formats import Row, differences_of, rows_of, unseen
from fp8rl.diagnose.doctor.watch import engine_holdings, watch_step
from fp8rl.diagnose.measure import ANSWERS, calibration_prompts, sampled_batch
from fp8rl.diagnose.report import Difference, Finding
from fp8rl.models.formats import Sighting
from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions import read_model
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rl.run.stack import Stack, open_pair
from fp8rl.rollout.types import HandshakeError, Prompt
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.manifest import SyncError

BF16 = "BF16 on both sides"


@dataclass
class Pair:
    """What was read and measured of a live trainer and a live engine."""

    findings: list[Finding] = field(default_factory=list)
    """The findings in the order in which they were made. What comes after a failed start or sync is missing."""
    quantized: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """HF names of the weights that run in FP8, by side: `trainer` and `engine`."""
    differences: dict[str, Difference] = field(default_factory=dict)
    """The differences that were measured, by name: `trainer against engine` and the floors."""
    rows: Sequence[Row] = ()
    """The precision map, with what was seen."""
    tokens: int = 0
    """Tokens of the training step that was watched."""
    seconds: float = 0.0
    """Seconds of all this."""

    @property
    def verdict(self) -> str:
        said = []
        for each in AGREEMENTS:
            made = [finding.grade == "ok" for finding in self.findings if finding.key.startswith(f"same {each},")]
            said.append(f"same {each} {'was not reached' if not made else 'holds' if all(made) else 'does not hold'}")
        wrong = {each.key for each in self.findings if each.grade == "error"} & {row.key for row in self.rows}
        formats = "were not reached" if not self.rows else "are not as planned" if wrong else "are as planned"
        return f"{', '.join(said)}, formats {formats}, in {self.seconds:.0f} s"


def compare(experiment: Experiment, *, say: Callable[[str], None] = print) -> Pair:
    """Compare trainer and engine of a spec that can run here. Afterwards both have ended."""
    began, found = time.monotonic(), Pair([agreement.same_precision(experiment)])
    try:
        with open_pair(experiment, say=say) as stack:
            _examine(stack, found, say)
    except HandshakeError as error:
        found.findings.append(agreement.refused_handshake(error))
    found.seconds = time.monotonic() - began
    return found


def _examine(stack: Stack, found: Pair, say: Callable[[str], None]) -> None:
    say("syncing the weights")
    try:
        found.findings.append(agreement.manifest_of(stack.syncing.sync()))
    except SyncError as error:
        found.findings.append(agreement.refused_sync(error))
        return  # generation stays paused
    say("sampling and scoring the calibration batch")
    prompts = calibration_prompts(stack)
    batch = sampled_batch(stack, prompts, ANSWERS, stack.experiment.rollout.temperature)
    found.findings.extend(_checks_of_spec(stack, batch, found))
    measured = found.differences["trainer against engine"] = logprobs.against_trainer(stack, batch)
    temperature = logprobs.sampler_temperature(stack, batch, measured)
    plain = batch if batch.temperature == 1.0 else sampled_batch(stack, prompts, ANSWERS, 1.0)
    floors = {
        "prefill against decode": logprobs.prefill_against_decode(stack, plain),
        "alone against together": logprobs.alone_against_together(stack, plain),
    }
    say("watching a training step and a forward pass of the engine, op by op")
    seen = _sightings(stack, batch, prompts)
    numerics = stack.numerics
    if numerics.mode == "native" and (numerics.trainer, numerics.rollout) != ("bf16", "bf16"):
        say("starting a BF16 engine, by which native mode is judged")
        floors[BF16] = logprobs.bf16_on_both_sides(stack, prompts, ANSWERS)
    found.differences |= floors
    found.findings.append(logprobs.trainer_against_engine(numerics, measured, floors.get(BF16)))
    found.findings.append(temperature)
    found.findings.extend(logprobs.noise_floor(numerics.mode, floors))
    found.rows, found.tokens = rows_of(seen), int(batch.real_tokens().sum())
    found.findings.extend(differences_of(seen))
    if lacking := unseen(found.rows):
        said = "inside a kernel, or inside an op of a library: as everything is that native mode leaves to one"
        found.findings.append(Finding("not seen", said, grade="note", names=tuple(lacking)))


def _checks_of_spec(stack: Stack, batch: TokenBatch, found: Pair) -> Iterator[Finding]:
    numerics, architecture = stack.numerics, stack.experiment.model.architecture
    report = stack.engines.ask(lambda client: client.report())
    manifest = stack.engines.ask(lambda client: client.manifest()).entries
    observed: list[Observed] = stack.trainer.apply(agreement.observe, batch)
    found.quantized = {
        "trainer": sorted({name for rank in observed for name in rank.quantized}),
        "engine": sorted(name for name, digest in manifest.items() if "@" in digest),  # of a weight as it is multiplied
    }
    yield agreement.handshake(numerics, engine_adapter(stack.experiment), report, architecture)
    yield agreement.quantized_modules(**found.quantized)
    yield agreement.kv_cache_dtype(numerics, report)
    if numerics.rollout_spec.quantized:
        scales = agreement.served_scales(stack.syncing.bridge.write_checkpoint(), manifest)
        names = sorted(name for name in manifest if name.endswith(SCALE_SUFFIX))
        yield agreement.scale_formats(scales, names, numerics.rollout_spec.weight.scale)


def _sightings(stack: Stack, batch: TokenBatch, prompts: Sequence[Prompt]) -> list[Sighting]:
    """Return what both sides were seen to hold and to compute. Afterwards the trainer has learnt from a step.

    Its loss is the likelihood of the answers: it needs no rewards, and no format depends on it.
    """
    experiment, numerics = stack.experiment, stack.experiment.numerics_config()
    model = read_model(experiment.model.directory).adapted(engine_adapter(experiment))
    seen: list[Sighting] = []
    for held in stack.engines.ask(lambda client: client.inventory()):
        seen += engine_holdings(held, model, numerics)
    if numerics.mode == "exact":
        tokens = [prompt.token_ids for prompt in prompts]
        for rank in stack.engines.ask(lambda client: client.formats(tokens)):
            seen += rank
    with stack.turn("train"):
        ranks = stack.trainer.apply(watch_step, batch, SftObjective.of(batch), numerics, experiment.trainer)
        stack.trainer.weight_version += 1  # of the update, which its ranks made by themselves
    return [*(sighting for rank in ranks for sighting in rank), *seen]
