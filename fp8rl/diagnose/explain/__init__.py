"""Explains a run or a capsule: is the trainer right, which op or tensor differs, and what is the likeliest cause?

A run is explained on tokens that its newest weights sample now. A capsule is explained on its own tokens, which the
trainer first scores again. Then a trainer and an engine are started here, and `compare` compares them op by op. The
run's own metrics say whether its difference is noise or a bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.text import Text

from fp8rl.diagnose.explain.causes import Comparison
from fp8rl.diagnose.explain.compare import compare
from fp8rl.diagnose.explain.rescore import Rescored, recorded, rescore
from fp8rl.diagnose.measure import LONG_PROMPTS, LONG_TOKENS, calibration_prompts, one_trainer, sampled_batch
from fp8rl.diagnose.report import Finding, Report, grid
from fp8rl.diagnose.subject import Subject
from fp8rl.models import read_model
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.experiment import with_keys
from fp8rl.rl.guard.bias import WINDOW
from fp8rl.rl.record.console import format_difference
from fp8rl.rl.record.metrics_log import metrics_found
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.engines.serving import engine_adapter
from fp8rl.rl.run.run import open_pair
from fp8rl.rollout.tasks.environments import EnvironmentSection
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.trainer.config import TrainerSection
from fp8rl.weight_sync.manifest import SyncError

SHOWN_OPS, SHOWN_EXPERTS = 12, 8


def explain(subject: Subject, *, quick: bool = False, say: Callable[[str], object]) -> Report:
    """Explain a run or a capsule; everything that is started ends with the call.

    Args:
        quick: only score a capsule again, in this process, without Ray or an engine.
        say: prints each step that begins.

    Raises:
        UserError: `quick` was given for a run; the weights are not the capsule's; a side or a sync refused something.
    """
    capsule, native = subject.capsule, subject.numerics.mode == "native"
    if capsule is None:
        if quick:
            remedy = "Name one of the run's capsules, or leave --quick out."
            raise user_error("--quick", str(subject.path), "a capsule, whose tokens are scored again", remedy)
        return reported(subject, None, None if native else _compared(subject, say)[1])
    if quick or native:
        say("scoring the capsule's sequences again")
        run, numerics = subject.experiment, subject.numerics  # they carry the reduction order of the run's layout
        size, longest = run.trainer.micro_batch_tokens, run.rollout.context_length
        with one_trainer(run.model.directory, numerics, size, longest, run.adapter) as trainer:
            again = rescore(capsule, lambda function, *args: [function(trainer, *args)])
        return reported(subject, again, None)
    return reported(subject, *_compared(subject, say))


def reported(subject: Subject, again: Rescored | None, compared: Comparison | None) -> Report:
    """Make the report: the new scores, the comparison, the likeliest causes of a difference, and the verdict.

    again: None for a run. compared: None if both sides were not compared.
    """
    findings: list[Finding] = [] if compared is None else [*compared.findings]
    tables: list[RenderableType] = []
    facts = {"scored_again": None if again is None else again.facts(), "compared": None}
    if again is not None:
        findings.append(again.finding)
        tables.append(again.table())
    if compared is not None:
        facts["compared"] = compared.facts()
        tables += [Text(_headline(subject, compared)), *_tables(compared)]
        if all(each.grade != "error" for each in findings) and compared.differs:
            found = "the log-probabilities differ, and no op or tensor does"
            remedy = "Explain other capsules of the run, and report it with what --json prints."
            findings.append(Finding("unexplained", found, remedy=remedy))
    elif subject.numerics.mode == "native":
        remedy = "See `fp8rl report` for log-probabilities, and `fp8rl doctor SPEC` for tensors."
        expected = "exact, to compare one program op by op"
        findings.append(Finding("numerics.mode", "native", expected, remedy, grade="note"))
    if (persistent := drift(subject)) is not None:
        findings.append(persistent)
    if subject.capsule is None and (steps := RunDir(subject.path).capsule_steps()):
        found, remedy = f"{len(steps)} of this run", f"`fp8rl explain {RunDir(subject.path).capsule(max(steps))}`."
        findings.append(Finding("capsules", f"{found}, with the tokens that a gate saw", remedy=remedy, grade="note"))
    grades = {each.grade for each in findings}
    verdict = "nothing differs" if again or compared else "only the metrics of the run were read"
    if "error" in grades:
        verdict = "something differs: the first finding is the likeliest cause"
    elif "warning" in grades:
        verdict = "nothing differs now, but the metrics of the run show a bias"
    return Report("explain", str(subject.path), tuple(findings), facts, tables=tuple(tables), verdict=verdict)


def drift(subject: Subject) -> Finding | None:
    """Say whether the difference that the run recorded is noise, which averages out over steps, or a bias, which adds
    up in the weights. A capsule is judged by the metrics up to its step. None: no difference was recorded."""
    run, last = subject.path, math.inf
    if subject.capsule is not None:
        run, last = subject.path.parent.parent, subject.capsule.about.step
        if subject.path != RunDir(run).capsule(last):
            return None  # it was copied from its run
    rows = [row for row in metrics_found(RunDir(run).metrics)[0] if row["step"] <= last]
    row = next((row for row in reversed(rows) if row.get("mismatch/bias_noise")), None)
    if row is None:
        return None
    names = ("mismatch/bias", "mismatch/context_bias")
    above = [name for name in names if row.get(name, 0.0) > row.get(f"{name}_noise", 0.0)]
    name, kind = (above[0], "bias") if above else (names[0], "noise")
    found = f"{kind}: the persistent part of d is {row.get(name, 0.0):.2g} nats in up to {WINDOW} steps until "
    found += f"{row['step']}; noise alone gives up to {row.get(f'{name}_noise', 0.0):.2g} (two standard deviations)"
    remedy = "A bias adds up in the weights: use numerics.mode=exact, or set algorithm.centering."
    if subject.numerics.mode == "exact":
        remedy = "A bias adds up in the weights, and exact mode has none: mend what the other findings name."
    return Finding(name, found, "at most what noise gives", remedy, grade="warning" if above else "ok")


def _headline(subject: Subject, compared: Comparison) -> str:
    """Say what was compared."""
    batch = "sampled tokens"
    if subject.capsule is None:  # whose |d| differs from that of the run's own batches
        batch = (
            f"tokens sampled now, at the newest weights: answers to problems of the run, and to {LONG_PROMPTS} prompts "
            f"of up to {LONG_TOKENS} tokens made of several problems"
        )
    mean, now = format_difference(compared.abs_diff_mean), format_difference(compared.live_abs_diff_mean)
    return (
        f"mean |d| is {mean} on {compared.tokens:,} {batch}; on the sequences that differ most, computed again, it is "
        f"{now} on {compared.traced_tokens:,} tokens"
    )


def _tables(compared: Comparison) -> Iterator[RenderableType]:
    """Render the causes that were removed, and the ops and experts that differ most."""
    d = format_difference
    causes = [(each.name, d(each.before), d(each.after), each.note) for each in compared.causes if each.before]
    ops = [
        ("" if op.layer is None else str(op.layer), op.op, d(op.relative_rms), f"{op.differing:.1%}", d(op.largest))
        for op in sorted(compared.ops, key=lambda op: -op.relative_rms)[:SHOWN_OPS]
        if op.relative_rms
    ]
    experts = [
        (str(each.layer), str(each.expert), str(each.tokens), d(each.relative_rms))
        for each in sorted(compared.experts, key=lambda expert: -expert.relative_rms)[:SHOWN_EXPERTS]
        if each.relative_rms
    ]
    for title, columns, rows in (
        ("one cause at a time", ("cause", "mean |d| before", "after", "what was changed"), causes),
        ("ops on equal inputs", ("layer", "op", "relative RMS", "elements", "largest"), ops),
        ("experts on equal inputs", ("layer", "expert", "tokens", "relative RMS"), experts),
    ):
        if rows:
            yield grid(columns, rows, title=title)


def _compared(subject: Subject, say: Callable[[str], object]) -> tuple[Rescored | None, Comparison]:
    """Start both sides, score a capsule again, and compare both sides op by op.

    For a run, its last weights first answer problems of its data, at its temperature.
    """
    capsule, again = subject.capsule, None
    # One rank each, but `numerics.k_splits` of the run, so that the rank adds in the order of the run's layout. There
    # are no rewards or environments, so no code that the subject names is imported.
    trainer = TrainerSection(micro_batch_tokens=subject.experiment.trainer.micro_batch_tokens)
    plain = {"rewards": RewardsSection(), "environment": EnvironmentSection()}
    experiment = with_keys(subject.experiment, {"trainer": trainer, "rollout.tp": 1, **plain})
    with open_pair(experiment, subject.numerics, say) as run:
        if subject.checkpoint is not None:
            with run.turn("train"):
                run.trainer.load(subject.checkpoint)
        elif capsule is not None:
            run.trainer.weight_version = capsule.scored.version
        try:
            run.syncing.sync()
        except SyncError as error:
            remedy = "`fp8rl doctor SPEC` names what differs; check that sglang has the locked version."
            raise user_error("sync", str(error), "engines that hold the trainer's weights", remedy) from error
        if capsule is None:
            say("sampling a calibration batch")
            batch = sampled_batch(run, calibration_prompts(run), run.experiment.rollout.temperature)
        else:
            say("scoring the capsule's sequences again")
            again, batch = rescore(capsule, run.trainer.apply), recorded(capsule)
        say("comparing op by op, then one cause at a time")
        (endpoint,) = run.engines.up()
        model = read_model(subject.experiment.model.directory).adapted(engine_adapter(subject.experiment))
        wrong = None if capsule is None else capsule.about.wrong
        return again, compare(run.trainer, endpoint, batch, subject.numerics, model, wrong=wrong)
