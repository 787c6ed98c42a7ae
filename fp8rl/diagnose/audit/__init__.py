"""Audits a run's precision: starts both sides, watches one training step op by op, asks the engine, and compares what
was seen with the precision map."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.diagnose.audit.watch import engine_holdings, watch_step
from fp8rl.diagnose.measure import ANSWERS, calibration_prompts, check_has_engine, sampled_batch, sync_weights
from fp8rl.diagnose.report import Finding, Report, graded, grid
from fp8rl.models import Model
from fp8rl.models.formats import Sighting
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.precision_map import CLASSES, DOCUMENTED
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions import check, read_model
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rl.run.stack import Stack, open_pair
from fp8rl.rollout.types import HandshakeError
from fp8rl.trainer.step.batch import TokenBatch


def audit(experiment: Experiment, *, say: Callable[[str], None] = print) -> Report:
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
    seen: list[Sighting] = []
    tokens, refused = 0, []
    try:
        with open_pair(experiment, say=say) as stack:
            tokens, seen = examine(stack, model, numerics, say)
    except HandshakeError as error:
        refused = [refused_engine(error)]
    return reported(experiment.run.name, numerics, seen, refused, tokens=tokens, seconds=time.monotonic() - began)


def examine(
    stack: Stack, model: Model, numerics: NumericsConfig, say: Callable[[str], None]
) -> tuple[int, list[Sighting]]:
    """Return the number of tokens of the step, and all that was seen. Afterwards the trainer has learnt from the step,
    and the engine holds the weights from before."""
    say("syncing the weights")
    sync_weights(stack)
    say("sampling answers and learning from them")
    prompts = calibration_prompts(stack)
    batch = sampled_batch(stack, prompts, ANSWERS, stack.experiment.rollout.temperature)
    holdings = stack.engines.ask(lambda client: client.inventory())
    computed: list[list[Sighting]] = []
    if numerics.mode == "exact":
        tokens = [prompt.token_ids for prompt in prompts]
        computed = stack.engines.ask(lambda client: client.formats(tokens))
    with stack.turn("train"):
        seen = trainer_sightings(stack, batch, numerics)
    for held in holdings:
        seen += engine_holdings(held, model, numerics)
    seen += [sighting for rank in computed for sighting in rank]
    return int(batch.real_tokens().sum()), seen


def trainer_sightings(stack: Stack, batch: TokenBatch, numerics: NumericsConfig) -> list[Sighting]:
    """Return the sightings of all ranks in one step.

    The loss is the likelihood of the answers: it needs no rewards, and no precision depends on it.
    """
    planned = numerics, stack.experiment.trainer
    ranks: list[list[Sighting]] = stack.trainer.apply(watch_step, batch, SftObjective.of(batch), *planned)
    stack.trainer.weight_version += 1  # of the update, which its ranks made by themselves
    return [sighting for rank in ranks for sighting in rank]


def refused_engine(error: HandshakeError) -> Finding:
    """Return the finding on an engine that reported at its start that it runs something else."""
    return Finding(
        key="engine",
        found=str(error),
        expected="an engine that runs what the experiment says",
        remedy="Nothing was sampled, and no step was watched. Start the engine from this spec, in this environment.",
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
    trainer: dict[str, int]
    """Counts by format in the trainer; empty if no such tensor was seen: there is none, or it is inside a kernel."""
    engine: dict[str, int]
    """The same in the engine."""
    bytes: int
    """Bytes of the tensors that are held or sent."""


def rows_of(sightings: Iterable[Sighting]) -> list[Row]:
    """Fill the precision map with all that was seen of each class."""
    by_key: dict[str, list[Sighting]] = {each.key: [] for each in CLASSES}
    for sighting in sightings:
        by_key[sighting.key].append(sighting)
    rows = []
    for each in CLASSES:
        seen, found = by_key[each.key], {"trainer": Counter[str](), "engine": Counter[str]()}
        for sighting in seen:
            found[sighting.side][sighting.found] += sighting.calls
        rows.append(
            Row(
                key=each.key,
                row=each.row,
                tensors=each.tensors,
                document=each.document,
                planned=list(dict.fromkeys(form for sighting in seen for form in sighting.planned)),
                **{side: dict(counts) for side, counts in found.items()},
                bytes=sum(sighting.bytes for sighting in seen),
            )
        )
    return rows


def differences_of(sightings: Sequence[Sighting]) -> list[Finding]:
    """Return what is not as planned, in the order of the map; tensors of one class and format are one finding."""
    wrong: dict[tuple[str, tuple[str, ...], str], dict[str, None]] = {}
    for sighting in sightings:
        if sighting.found not in sighting.planned:
            wrong.setdefault((sighting.key, sighting.planned, sighting.found), {})[sighting.name] = None
    classes = {each.key: each for each in CLASSES}
    order = list(classes)
    return [
        Finding(key, found, " or ".join(planned), f"{classes[key].why} {classes[key].remedy}", names=tuple(names))
        for (key, planned, found), names in sorted(wrong.items(), key=lambda item: order.index(item[0][0]))
    ]


def unseen(rows: Iterable[Row]) -> list[str]:
    """Return the classes that every model has, that the published map lists, and of which nothing was seen."""
    return [
        r.key for r in rows if r.row in DOCUMENTED and not (r.trainer or r.engine) and r.key not in _NOT_IN_EVERY_RUN
    ]


def reported(
    subject: str, numerics: NumericsConfig, seen: Sequence[Sighting], refused: Sequence[Finding] = (), **facts: Any
) -> Report:
    """Make the report of an audit: the map, what differs with the reason and the remedy, and the verdict."""
    rows, findings = rows_of(seen), [*refused, *differences_of(seen)]
    facts |= {"spec_digest": numerics.spec.digest(), "mode": numerics.mode, "rows": rows, "unseen": unseen(rows)}
    facts |= {"trainer": numerics.trainer, "rollout": numerics.rollout}
    verdict = f"audit failed: {len(findings)} differences" if findings else "audit passed: everything is as planned"
    if facts["unseen"]:
        said = "inside a kernel, or inside an op of a library"
        findings.append(Finding("not seen", said, grade="note", names=tuple(facts["unseen"])))
    table = _map(rows, {finding.key for finding in findings if finding.grade == "error"})
    return Report("audit", subject, tuple(findings), facts, tables=(table,), verdict=verdict)


def _map(rows: Iterable[Row], wrong: Collection[str]) -> Table:
    """Render the precision map. wrong: classes that are not as planned."""
    shown: list[tuple[RenderableType, ...]] = []
    last = ""
    for row in rows:
        if not (row.trainer or row.engine):
            continue
        if row.row != last:
            shown.append(("", Text(row.row, style="bold")))
        last = row.row
        sides = (", ".join(f"{form} x {n:,}" for form, n in side.items()) for side in (row.trainer, row.engine))
        size = f"{row.bytes:,}" if row.bytes else ""
        verdict = graded("FAIL", "error") if row.key in wrong else graded("pass", "ok")
        shown.append((verdict, f"  {row.key}", " or ".join(row.planned), *sides, size))
    return grid(("", "tensors", "planned", "trainer", "engine", "bytes"), shown, numbers=5)
