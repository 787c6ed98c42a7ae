"""`--keep`: results of full runs go into the documentation, and `docs/studies.md` is written from them."""

from __future__ import annotations

import shutil
from pathlib import Path

from numerics.errors import user_error
from numerics.files import write_atomically
from rl.studies.names import NAMES, load
from rl.studies.provenance import provenance
from rl.studies.result import RESULTS, Result, read_result, result_of

KEPT = Path("docs/studies")
PAGE = Path("docs/studies.md")


def check(quick: bool) -> None:
    """Refuse what may not be kept, before anything runs.

    Raises:
        UserError: a quick run, or files that are not committed.
    """
    if quick:
        raise user_error(
            "--keep",
            found="--quick",
            expected="a full run, which alone gives verdicts",
            remedy="Leave one of the two out.",
        )
    made = provenance()
    if made["commit"] is None or made["dirty"]:
        raise user_error(
            "--keep",
            found="no git checkout" if made["commit"] is None else "changes that are not committed",
            expected="a clean checkout, so that the results name the code that made them",
            remedy="Commit or stash them first.",
        )


def keep(run: Path) -> None:
    """Copy a study's JSON and figures."""
    KEPT.mkdir(parents=True, exist_ok=True)
    name = run.name
    for old in KEPT.glob(f"{name}.*"):
        old.unlink()
    for old in KEPT.glob(f"{name}-*.svg"):
        old.unlink()
    shutil.copyfile(run / RESULTS, KEPT / f"{name}.json")
    for figure in run.glob("*.svg"):
        shutil.copyfile(figure, KEPT / f"{name}-{figure.name}")


def kept(folder: Path = KEPT) -> list[Result]:
    """The kept results of the studies that there are, in their order."""
    return [
        result_of(load(name), read_result(folder / f"{name}.json"))
        for name in NAMES
        if (folder / f"{name}.json").is_file()
    ]


def write_docs() -> None:
    """Write `docs/studies.md`."""
    from rl.studies.document import document

    write_atomically(PAGE, document(kept()))
