"""`--keep`: results of full runs go into lab/docs, from which `lab/docs/studies.md` is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.files import new_directory
from fp8rl.numerics.core.reading import read_text
from lab.studies.harness import result as results
from lab.studies.harness.result import RESULTS, Result, read_result, result_of
from lab.studies.harness.study import NAMES, load

KEPT = Path("lab/docs/studies")
KEPT_FORMATS = KEPT / "formats.json"
"""The table of formats that `fp8rl doctor examples/arithmetic.yaml --json` has printed on a clean checkout, as the fact
`rows`."""


def check(quick: bool) -> None:
    """Refuse what may not be kept, before anything runs.

    Raises:
        UserError: a quick run, files that are not committed, or another folder than the checkout's root.
    """
    if quick:
        raise user_error(
            "--keep",
            found="--quick",
            expected="a full run, which alone gives verdicts",
            remedy="Leave one of the two out.",
        )
    made = results.provenance()
    if made["commit"] is None or made["dirty"]:
        raise user_error(
            "--keep",
            found="no git checkout" if made["commit"] is None else "changes that are not committed",
            expected="a clean checkout, so that the results name the code that made them",
            remedy="Commit or stash them first.",
        )
    if Path.cwd().resolve() != results.CODE:
        raise user_error(
            "--keep",
            found=f"the folder {Path.cwd()}",
            expected=f"the root of the checkout whose code measures, {results.CODE}",
            remedy="Change there, or leave --keep out.",
        )


def keep(result: Result, run: Path, say: Callable[[str], None]) -> None:
    """Copy a study's JSON and figures into a folder of its own, which appears whole or not at all.

    Results whose controls do not hold, that lack arms, or that were measured on a checkout that was changed meanwhile,
    are not kept: what was kept before stays, and `say` is told.
    """
    name = result.study.name
    if result.broken_controls:
        say(f"{name}: not kept, as controls do not hold: {', '.join(result.broken_controls)}")
        return
    if result.measurement.missing:
        say(f"{name}: not kept, as arms are missing: {'; '.join(result.measurement.missing)}")
        return
    if result.made["dirty"]:
        say(f"{name}: not kept, as files were changed before it began")
        return
    with new_directory(KEPT / name) as partial:
        for file in (run / RESULTS, *run.glob("*.svg")):
            shutil.copyfile(file, partial / file.name)


def kept() -> list[Result]:
    """The kept results of the studies that there are, in their order."""
    paths = {name: KEPT / name / RESULTS for name in NAMES}
    return [result_of(load(name), read_result(path)) for name, path in paths.items() if path.is_file()]


def kept_figures(name: str) -> list[Path]:
    """The figures of a kept study."""
    return sorted((KEPT / name).glob("*.svg"))


def kept_formats() -> list[dict[str, Any]]:
    """The table of formats that is kept; empty: none is."""
    return json.loads(read_text(KEPT_FORMATS, "formats", "a table of formats")) if KEPT_FORMATS.is_file() else []
