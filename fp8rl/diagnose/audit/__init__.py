"""Audits a run's precision: starts both sides, watches one training step op by op, asks the engine, and compares what
was seen with the precision map."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fp8rl.diagnose.audit.observations import Observation, engine_sightings
from fp8rl.diagnose.audit.watch import watch_step
from fp8rl.diagnose.measure import ANSWERS, calibration_prompts, check_has_engine, sampled_batch, sync_weights
from fp8rl.diagnose.report import Report, graded, grid
from fp8rl.models import Model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.precision_map import CLASSES, DOCUMENTED
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions import check, read_model
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rl.run.run import Run, open_pair
from fp8rl.rollout.types import HandshakeError
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.manifest import some_of


def audit(experiment: Experiment, *, say: Callable[[str], None] = print) -> AuditReport:
    """Compare what a spec's trainer and engine compute, hold and send with the precision map of its numerics.

    Args:
        say: called with what is going on.

    Raises:
        UserError: no run of the spec could start, or the sync fails.
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
    stack: Run, model: Model, numerics: NumericsConfig, say: Callable[[str], None]
) -> tuple[int, list[Observation]]:
    """Return the number of tokens of the step, and all that was seen. Afterwards the trainer has learnt from the step,
    and the engine holds the weights from before."""
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


def trainer_sightings(stack: Run, batch: TokenBatch, numerics: NumericsConfig) -> list[Observation]:
    """Return the sightings of all ranks in one step.

    The loss is the likelihood of the answers: it needs no rewards, and no precision depends on it.
    """
    planned = numerics, stack.experiment.trainer
    ranks: list[list[Observation]] = stack.trainer.apply(watch_step, batch, SftObjective.of(batch), *planned)
    stack.trainer.weight_version += 1  # of the update, which its ranks made by themselves
    return [sighting for rank in ranks for sighting in rank]


def refused_engine(error: HandshakeError) -> Deviation:
    """Return the deviation of an engine that reported at its start that it runs something else."""
    return Deviation(
        key="engine",
        names=["handshake"],
        planned="an engine that runs what the experiment says",
        found=str(error),
        why="Nothing was sampled, and no step was watched.",
        remedy="Start the engine from this spec, in this environment.",
    )


_NOT_IN_EVERY_RUN = {
    "head.weight",
    "product.cached",
    *(each.key for each in CLASSES if each.key.startswith("experts.")),
}
"""Classes that a run may lack: a head may be tied to the embedding, BF16 has no codes, a dense model no experts."""


@dataclass(frozen=True)
class Row:
    """One class of tensors; `key`, `row`, `tensors` and `document` are as in `precision_map.TensorClass`."""

    key: str
    row: str
    tensors: str
    document: str
    planned: list[str]
    """Formats that are allowed."""
    found: dict[str, int]
    """Counts by format; empty if no such tensor was seen: the run has none, or it is inside a fused kernel."""
    bytes: int
    """Bytes of the tensors that are held or sent."""


@dataclass(frozen=True)
class Deviation:
    """Tensors of one class that are not as planned."""

    key: str
    names: list[str]
    planned: str
    found: str
    why: str
    remedy: str
    """The place to look at."""


@dataclass(frozen=True)
class AuditReport(Report):
    """The findings of an audit. Its JSON has these keys, and `schema`, `ok` and `unseen`."""

    spec_digest: str
    mode: str
    trainer: str
    rollout: str
    rows: list[Row]
    """The precision map."""
    differences: list[Deviation]
    tokens: int
    """Tokens of the step that was watched."""
    seconds: float
    """Seconds of the whole audit."""

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def unseen(self) -> list[str]:
        """Classes that every model has, that the published map lists, and of which nothing was seen."""
        return [r.key for r in self.rows if r.row in DOCUMENTED and not r.found and r.key not in _NOT_IN_EVERY_RUN]

    def derived(self) -> dict[str, Any]:
        return {"unseen": self.unseen}


def rows_of(sightings: Iterable[Observation]) -> list[Row]:
    """Fill the precision map with all that was seen of each class."""
    by_key: dict[str, list[Observation]] = {each.key: [] for each in CLASSES}
    for sighting in sightings:
        by_key[sighting.key].append(sighting)
    rows = []
    for each in CLASSES:
        seen, found = by_key[each.key], Counter[str]()
        for sighting in seen:
            found[sighting.found] += sighting.calls
        rows.append(
            Row(
                key=each.key,
                row=each.row,
                tensors=each.tensors,
                document=each.document,
                planned=list(dict.fromkeys(form for sighting in seen for form in sighting.planned)),
                found=dict(found),
                bytes=sum(sighting.bytes for sighting in seen),
            )
        )
    return rows


def differences_of(sightings: Sequence[Observation]) -> list[Deviation]:
    """Return what is not as planned, in the order of the map; tensors of one class and format are one deviation."""
    wrong: dict[tuple[str, tuple[str, ...], str], dict[str, None]] = {}
    for sighting in sightings:
        if sighting.found not in sighting.planned:
            wrong.setdefault((sighting.key, sighting.planned, sighting.found), {})[sighting.name] = None
    classes = {each.key: each for each in CLASSES}
    order = list(classes)
    return [
        Deviation(key, list(names), " or ".join(planned), found, classes[key].why, classes[key].remedy)
        for (key, planned, found), names in sorted(wrong.items(), key=lambda item: order.index(item[0][0]))
    ]


def rendered(report: AuditReport) -> RenderableType:
    """Render the map, what differs with the reason and the remedy, and the verdict."""
    wrong, last = {difference.key for difference in report.differences}, ""
    rows: list[tuple[RenderableType, ...]] = []
    for row in report.rows:
        if not row.found:
            continue
        if row.row != last:
            rows.append(("", Text(row.row, style="bold")))
        last = row.row
        found = ", ".join(f"{form} x {count:,}" for form, count in row.found.items())
        size = f"{row.bytes:,}" if row.bytes else ""
        verdict = graded("FAIL", "bad") if row.key in wrong else graded("pass", "good")
        rows.append((verdict, f"  {row.key}", " or ".join(row.planned), found, size))
    lines = []
    for each in report.differences:
        said = f"{each.key}: found {each.found}, planned {each.planned}: {some_of(each.names)}"
        lines += ["", said, f"{each.why} {each.remedy}"]
    if report.unseen:
        unseen = f"not seen, as a kernel fuses it or rounds otherwise than its definition: {', '.join(report.unseen)}"
        lines += ["", unseen]
    what = "everything is as planned" if report.ok else f"{len(report.differences)} differences"
    end = f"audit {'passed' if report.ok else 'failed'} in {report.seconds:.0f} s: {what}"
    return Group(
        grid(("", "tensors", "planned", "found", "bytes"), rows, numbers=4),
        *(Text(line, style="yellow") for line in lines),
        Text(),
        graded(end, "good" if report.ok else "bad"),
    )
