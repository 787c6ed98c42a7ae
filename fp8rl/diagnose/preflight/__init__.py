"""The preflight starts both sides once and says whether they agree: same spec, same bytes, same log-probabilities.

The checks that need no process come first, then the three agreements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.measure import ANSWERS, calibration_prompts, check_has_engine, sampled_batch
from fp8rl.diagnose.preflight import same_logprobs, same_spec
from fp8rl.diagnose.preflight.same_spec import Agreement, Check, Observed
from fp8rl.diagnose.report import Difference, Report, graded
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions import check, read_model
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rl.run.run import Run, open_pair
from fp8rl.rollout.types import HandshakeError
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.manifest import SyncError

BF16 = "BF16 on both sides"
_TITLES: dict[Agreement, str] = {"spec": "same spec", "bytes": "same bytes", "logprobs": "same logprobs"}


@dataclass(frozen=True)
class PreflightReport(Report):
    """The findings of a preflight. Its JSON has these keys, and `schema`, `ok` and `verdicts` (by agreement)."""

    spec_digest: str
    mode: str
    trainer: str
    rollout: str
    checks: list[Check]
    """The checks in the order in which they were made. Checks after a check that stops the preflight are missing."""
    quantized: dict[str, list[str]]
    """HF names of the weights that run in FP8, by side: `trainer` and `engine`."""
    differences: dict[str, Difference]
    """The differences that were measured, by name: `trainer against engine` and the floors."""
    seconds: float
    """Seconds of the whole preflight."""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def verdicts(self) -> dict[Agreement, bool | None]:
        """For each agreement, whether it holds; None if nothing of it was checked."""
        made = {agreement: [check.ok for check in self.checks if check.agreement == agreement] for agreement in _TITLES}
        return {agreement: all(checks) if checks else None for agreement, checks in made.items()}

    def derived(self) -> dict[str, Any]:
        return {"verdicts": self.verdicts}


def preflight(experiment: Experiment, *, quick: bool = False, say: Callable[[str], None] = print) -> PreflightReport:
    """Check the three agreements of a spec.

    Args:
        quick: leave out BF16/BF16, which needs another engine.
        say: called with what is going on.

    Raises:
        UserError: no run could start with the spec's model, data or sizes.
    """
    began = time.monotonic()
    if quick and experiment.numerics.mode == "native":
        raise user_error(
            "--quick",
            found="numerics.mode=native",
            expected="exact: native mode is judged beside BF16/BF16, which --quick leaves out",
            remedy="Leave --quick out.",
        )
    path, numerics = experiment.model.directory, experiment.numerics_config()
    model = read_model(path)
    aligned = same_spec.block_alignment(model.shape, experiment)
    found = PreflightReport(
        spec_digest=numerics.spec.digest(),
        mode=numerics.mode,
        trainer=numerics.trainer,
        rollout=numerics.rollout,
        checks=[aligned, same_spec.same_precision(experiment)],
        quantized={"trainer": [], "engine": []},
        differences={},
        seconds=0.0,
    )
    if not aligned.ok:
        check_stored(path, model)  # which `check` does too
    else:
        check(experiment)
        check_has_engine(experiment)
        try:
            with open_pair(experiment, say=say) as stack:
                _examine(stack, found, quick, say)
        except HandshakeError as error:
            found.checks.append(same_spec.refused_handshake(error))
    return replace(found, seconds=time.monotonic() - began)


def _examine(stack: Run, found: PreflightReport, quick: bool, say: Callable[[str], None]) -> None:
    say("syncing the weights")
    try:
        found.checks.append(same_spec.manifest_of(stack.syncing.sync()))
    except SyncError as error:
        found.checks.append(same_spec.refused_sync(error))
        return  # generation stays paused
    say("sampling and scoring the calibration batch")
    prompts = calibration_prompts(stack)
    batch = sampled_batch(stack, prompts, ANSWERS, stack.experiment.rollout.temperature)
    found.checks.extend(_checks_of_spec(stack, batch, found))

    numerics, differences = stack.numerics, found.differences
    measured = differences["trainer against engine"] = same_logprobs.against_trainer(stack, batch)
    temperature = same_logprobs.sampler_temperature(stack, batch, measured)
    plain = batch if batch.temperature == 1.0 else sampled_batch(stack, prompts, ANSWERS, 1.0)
    floors = {
        "prefill against decode": same_logprobs.prefill_against_decode(stack, plain),
        "alone against together": same_logprobs.alone_against_together(stack, plain),
    }
    if not quick and (numerics.trainer, numerics.rollout) != ("bf16", "bf16"):
        say("starting a BF16 engine for the noise floor")
        floors[BF16] = same_logprobs.bf16_on_both_sides(stack, prompts, ANSWERS)
    differences |= floors
    found.checks.append(same_logprobs.trainer_against_engine(numerics, measured, floors.get(BF16)))
    found.checks.append(temperature)
    found.checks.extend(same_logprobs.noise_floor(numerics.mode, floors))


def _checks_of_spec(stack: Run, batch: TokenBatch, found: PreflightReport) -> Iterator[Check]:
    numerics, architecture = stack.numerics, stack.experiment.model.architecture
    report = stack.engines.ask(lambda client: client.report())
    manifest = stack.engines.ask(lambda client: client.manifest()).entries
    observed: list[Observed] = stack.trainer.apply(same_spec.observe, batch)
    quantized = {
        "trainer": sorted({name for rank in observed for name in rank.quantized}),
        "engine": sorted(name for name, digest in manifest.items() if "@" in digest),  # of a weight as it is multiplied
    }
    found.quantized.update(quantized)
    yield same_spec.handshake(numerics, engine_adapter(stack.experiment), report, architecture)
    yield same_spec.quantized_modules(**quantized)
    yield same_spec.kv_cache_dtype(numerics, report)
    if numerics.rollout_spec.quantized:
        scales = same_spec.served_scales(stack.syncing.bridge.write_checkpoint(), manifest)
        names = sorted(name for name in manifest if name.endswith(SCALE_SUFFIX))
        yield same_spec.scale_formats(scales, names, numerics.rollout_spec.weight.scale)


def rendered(report: PreflightReport) -> RenderableType:
    """Render the checks by agreement, the expectation and the remedy of each failed check, and the verdict."""
    parts: list[RenderableType] = []
    for agreement, title in _TITLES.items():
        table = Table(box=None, pad_edge=False, show_header=False)
        for overflow in ("ignore", "ignore", "fold"):
            table.add_column(overflow=overflow, no_wrap=overflow == "ignore")  # type: ignore[arg-type]
        for each in report.checks:
            if each.agreement == agreement:
                passed = graded(" pass", "good") if each.ok else graded(" FAIL", "bad")
                table.add_row(passed, each.name, Text(each.found))
                for line in () if each.ok else (f"expected {each.expected}", each.remedy):
                    table.add_row("", "", Text(line, style="yellow"))
        parts += [Text(title, style="bold"), table] if table.row_count else []
    said = {True: "holds", False: "does not hold", None: "was not reached"}
    verdicts = ", ".join(f"{_TITLES[agreement]} {said[verdict]}" for agreement, verdict in report.verdicts.items())
    end = f"preflight {'passed' if report.ok else 'failed'} in {report.seconds:.0f} s: {verdicts}"
    return Group(*parts, Text(), graded(end, "good" if report.ok else "bad"))
