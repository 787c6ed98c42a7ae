"""Starts both sides of a spec once, and compares spec, bytes, log-probabilities, and the format of every tensor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fp8rl.diagnose.doctor import logprobs
from fp8rl.diagnose.doctor.formats import Row, differences_of, rows_of, unseen
from fp8rl.diagnose.doctor.logprobs import SAME_PRECISION, judged
from fp8rl.diagnose.doctor.watch import engine_holdings, watch_step
from fp8rl.diagnose.measure import calibration_prompts, sampled_batch
from fp8rl.diagnose.report import Difference, Finding
from fp8rl.models.formats import Sighting
from fp8rl.numerics.sampling import EVERY_TOKEN
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions import read_model
from fp8rl.rl.run.engines.serving import engine_adapter, expected_report
from fp8rl.rl.run.run import Run, open_pair
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import HandshakeError, Prompt
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.manifest import SyncError

BF16 = "BF16 on both sides"


@dataclass
class Pair:
    """What was measured on a running trainer and a running engine."""

    findings: list[Finding] = field(default_factory=list)
    """The findings in the order in which they were made. A failed start or sync leaves out all later ones."""
    differences: dict[str, Difference] = field(default_factory=dict)
    """The measured differences by name: `trainer against engine` and the noise floors."""
    rows: Sequence[Row] = ()
    """The precision map, with the formats that were seen."""
    tokens: int = 0
    """Tokens of the training step that was watched."""
    seconds: float = 0.0
    """Seconds that all checks took."""

    @property
    def verdict(self) -> str:
        said = []
        for each in ("spec", "bytes", "logprobs"):
            made = [finding.grade == "ok" for finding in self.findings if finding.key.startswith(f"same {each},")]
            said.append(f"same {each} {'was not reached' if not made else 'holds' if all(made) else 'does not hold'}")
        wrong = {each.key for each in self.findings if each.grade == "error"} & {row.key for row in self.rows}
        formats = "were not reached" if not self.rows else "are not as planned" if wrong else "are as planned"
        return f"{', '.join(said)}, formats {formats}, in {self.seconds:.0f} s"


def compare(experiment: Experiment, *, say: Callable[[str], None] = print) -> Pair:
    """Start trainer and engine of a spec that can run here, compare them, and end both."""
    began, found = time.monotonic(), Pair([same_precision(experiment)])
    wanted = "an engine that reports the trainer's spec, numerics and hooks"
    try:
        with open_pair(experiment, say=say) as run:
            report = expected_report(run.numerics, engine_adapter(experiment), experiment.model.architecture)
            versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
            same = f"spec {report.spec_digest}, {len(report.hooks)} hooks, {versions}"
            found.findings.append(judged("spec", "handshake", True, same, wanted))
            _examine(run, found, say)
    except HandshakeError as error:
        remedy = "Start the engine from this spec, in this environment."
        found.findings.append(judged("spec", "handshake", False, str(error), wanted, remedy))
    found.seconds = time.monotonic() - began
    return found


def same_precision(experiment: Experiment) -> Finding:
    """Check that both sides quantize by the spec, or both run BF16."""
    trainer, rollout = experiment.numerics.trainer, experiment.numerics.rollout
    ok = (trainer == "bf16") == (rollout == "bf16")
    found = f"numerics.trainer={trainer}, numerics.rollout={rollout}"
    expected = "FP8 on both sides or BF16 on both sides"
    return judged("spec", "precision of both sides", ok, found, expected, SAME_PRECISION)


def _examine(run: Run, found: Pair, say: Callable[[str], None]) -> None:
    say("syncing the weights")
    equal = "every tensor's digest equal in trainer and engine"
    try:
        sync = run.syncing.sync()
    except SyncError as error:
        remedy = "Compare the versions of sglang and of this distribution in both environments."
        found.findings.append(judged("bytes", "manifest", False, str(error), equal, remedy))
        return  # generation stays paused
    said = f"{sync.verified_tensors} tensors equal, {sync.bytes} bytes in {sync.seconds:.2f} s"
    found.findings.append(judged("bytes", "manifest", sync.verified_tensors > 0, said, equal))
    say("sampling and scoring the calibration batch")
    prompts, asked = calibration_prompts(run), run.experiment.rollout.temperature
    batch = sampled_batch(run, prompts, asked)
    measured = found.differences["trainer against engine"] = logprobs.against_trainer(run, batch)
    temperature = logprobs.sampler_temperature(run, batch, measured)
    plain = batch if asked == 1.0 and not batch.truncation.cuts else sampled_batch(run, prompts, 1.0, EVERY_TOKEN)
    floors = {
        "prefill against decode": logprobs.prefill_against_decode(run, plain),
        "alone against together": logprobs.alone_against_together(run, plain),
    }
    say("watching a training step and a forward pass of the engine, op by op")
    seen = _sightings(run, batch, prompts)
    numerics = run.numerics
    if numerics.mode == "native" and (numerics.trainer, numerics.rollout) != ("bf16", "bf16"):
        say("starting a BF16 engine, with which native mode is compared")
        run.switch(numerics.in_bf16())
        run.syncing.sync()
        floors[BF16] = logprobs.against_trainer(run, sampled_batch(run, prompts, asked))
    found.differences |= floors
    found.findings.append(logprobs.trainer_against_engine(numerics, measured, floors.get(BF16)))
    found.findings.append(temperature)
    found.findings.extend(logprobs.noise_floor(numerics.mode, floors))
    found.rows, found.tokens = rows_of(seen), int(batch.real_tokens().sum())
    found.findings.extend(differences_of(seen))
    if lacking := unseen(found.rows):
        said = "inside a kernel or a library's op, as most tensors are in native mode"
        found.findings.append(Finding("formats not seen", said, grade="note", names=tuple(lacking)))


def _sightings(run: Run, batch: TokenBatch, prompts: Sequence[Prompt]) -> list[Sighting]:
    """Return the formats of all tensors that both sides hold and compute. This trains one step.

    The step's loss is the likelihood of the answers, because that needs no rewards. No format depends on the loss.
    """
    experiment, numerics = run.experiment, run.experiment.numerics_config()
    model = read_model(experiment.model.directory).adapted(engine_adapter(experiment))

    async def of_engine() -> list[Sighting]:
        async with EngineClient(run.engines.up()[0]) as client:
            found = [engine_holdings(rank, model, numerics) for rank in await client.inventory()]
            if numerics.mode == "exact":
                found += await client.formats([prompt.token_ids for prompt in prompts])
            return [each for rank in found for each in rank]

    seen = asyncio.run(of_engine())
    with run.turn("train"):
        ranks = run.trainer.apply(watch_step, batch, SftObjective.of(batch), numerics, experiment.trainer)
        run.trainer.weight_version += 1  # of the update, which its ranks made by themselves
    return [*(sighting for rank in ranks for sighting in rank), *seen]
