"""`fp8rl study`: measure, judge, draw, write."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import RenderableType

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.files import check_writable, new_directory
from lab.studies.document.document import write_docs
from lab.studies.harness import figures, keeping, page
from lab.studies.harness.claims import digest, judge
from lab.studies.harness.lab import Lab
from lab.studies.harness.result import RESULTS, Result, provenance
from lab.studies.harness.study import NAMES, Study, load
from lab.studies.harness.subjects import check_subjects

QUICK_SEEDS = 3
FOLDER = Path("runs/studies")


def run_studies(
    names: Sequence[str],
    *,
    every: bool,
    quick: bool,
    seeds: int | None,
    keep: bool,
    say: Callable[[RenderableType], None],
    out: Path = FOLDER,
) -> bool:
    """Run studies one after the other into folders of `out`. Returns whether their controls hold.

    Raises:
        UserError: an unknown study, too few seeds, results that may not be kept, or no model to study.
    """
    chosen = studies_named(names, every)
    check_subjects()
    counts = [seeds_of(study, quick, seeds) for study in chosen]
    for study in chosen:
        if study.check and not quick:
            study.check()
        check_writable(path := out / study.name, "--out")
        if os.path.lexists(path) and not (path / RESULTS).is_file():
            expected = "a new folder, or results of a study to replace"
            raise user_error("--out", found=str(path), expected=expected, remedy="Choose another folder, or move it.")
    if keep:
        keeping.check(quick)
    sound = True
    for study, count in zip(chosen, counts, strict=True):
        say(f"{study.name}: {study.question}")
        result = run_study(study, quick=quick, seeds=count, folder=out, say=say)
        sound = sound and not result.broken_controls
        say(page.for_a_terminal(result))
        say(f"{out / study.name / 'index.html'}, {result.seconds:.0f} s")
        if keep:
            keeping.keep(result, out / study.name, say)
            write_docs()
    return sound


def run_study(study: Study, *, quick: bool, seeds: int | None, folder: Path, say: Callable[[str], None]) -> Result:
    """Run a study and write `folder`/NAME, which appears whole or not at all.

    Args:
        seeds: how many; by default as few as a verdict needs, or 3 in a quick run.

    Raises:
        UserError: too few seeds.
    """
    count = seeds_of(study, quick, seeds)
    made = provenance()
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(quick, tuple(range(count)), Path(scratch), lambda text: say(f"{study.name}: {text}"))
        began = time.monotonic()
        measurement = study.measure(lab)
        seconds = time.monotonic() - began
    result = Result(
        study=study,
        measurement=measurement,
        judged=judge(study.claims, measurement.values, full=not quick, missing=measurement.missing),
        claims_digest=digest(study.claims),
        quick=quick,
        seeds=lab.seeds,
        seconds=seconds,
        made=made,
        specs=lab.specs,
    )
    write(result, folder / study.name)
    return result


def seeds_of(study: Study, quick: bool, asked: int | None) -> int:
    """The number of seeds that a study runs with.

    Raises:
        UserError: fewer are asked for than it takes.
    """
    fewest = QUICK_SEEDS if quick else study.seeds
    if asked is not None and asked < fewest:
        raise user_error("--seeds", found=asked, expected=f"at least {fewest} for {study.name}", remedy="Raise it.")
    return fewest if asked is None else asked


def write(result: Result, path: Path) -> None:
    """`results.json`, `table.md`, the figures and `index.html`."""
    drawn = {
        name: figures.to_svg(figure, result.caption()) for name, figure in result.study.draw(result.measurement).items()
    }
    with new_directory(path) as partial:
        (partial / RESULTS).write_text(result.to_json(), encoding="utf-8")
        page.write_tables(partial / "table.md", result)
        for name, svg in drawn.items():
            (partial / f"{name}.svg").write_text(svg, encoding="utf-8")
        page.write_index(partial / "index.html", result, drawn)


def studies_named(names: Sequence[str], every: bool) -> list[Study]:
    """The studies to run, in the order of `NAMES`.

    Raises:
        UserError: an unknown name, or none.
    """
    if every == bool(names):
        raise user_error(
            "study",
            found="names and --all" if every else "no name",
            expected=f"names out of {', '.join(NAMES)}, or --all",
            remedy="Say one or the other.",
        )
    loaded = [load(name) for name in dict.fromkeys(names or NAMES)]
    return sorted(loaded, key=lambda study: NAMES.index(study.name))
