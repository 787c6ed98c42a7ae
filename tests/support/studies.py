"""A study that takes no time, and a repository to run and keep studies in."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lab.studies import run
from lab.studies.harness import figures, keeping, result
from lab.studies.harness import study as studies
from lab.studies.harness.claims import Claim, Control, Rule
from lab.studies.harness.lab import Lab
from lab.studies.harness.study import Measurement, Study, TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "made_up"


def made_up(twice: float = 0.0, loss: float = 0.5, more: Sequence[Claim] = ()) -> Study:
    """One whose arm has this loss, give or take a hundredth, beside one of 0.4.

    Args:
        twice: what the negative control finds; it holds if that is 0. more: claims.
    """

    def measure(lab: Lab) -> Measurement:
        noise = [0.01 * seed for seed in range(len(lab.seeds))]
        arms = {"plain": 0.4, "again": 0.4 + twice, "bad": 9.0, "arm": loss}
        values = {name: {"loss": [value + n * (name == "arm") for n in noise]} for name, value in arms.items()}
        return Measurement(values, subject="nothing")

    def draw(measurement: Measurement) -> Mapping[str, Figure]:
        return {"losses": figures.figure("Losses")}

    def tables(measurement: Measurement) -> Sequence[TextTable]:
        return [TextTable("Losses", ("arm", "loss"), [["arm", "0.5"]])]

    def claim(id: str, says: str, arm: str, rule: Rule, *bounds: float, control: Control | None = None) -> Claim:
        than_plain = {"metric": "loss", "against": "plain", "contrast": "difference"}
        return Claim(id=id, says=says, arm=arm, rule=rule, bounds=bounds, control=control, **than_plain)

    claims = (
        claim("same arm twice", "", "again", "within", 0.0, 0.0, control="negative"),
        claim("harm", "Harm is found.", "bad", "above", 1.0, control="positive"),
        claim("003-16", "003-16 it is.", "arm", "above", 0.0), *more,
    )  # fmt: skip
    return Study(name=NAME, question="Is it?", claims=claims, measure=measure, draw=draw, tables=tables)


def repository(folder: Path, patch: pytest.MonkeyPatch, study: Study) -> None:
    """Make a folder a committed checkout, go there, take it for the code's, and have this study alone."""
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("/runs/\n")
    git(folder, "init", "-q")
    commit(folder)
    patch.chdir(folder)
    patch.setattr(result, "CODE", folder.resolve())
    for module in (studies, run, keeping):
        patch.setattr(module, "NAMES", (NAME,))
    for module in (run, keeping):
        patch.setattr(module, "load", lambda name: study)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "all")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True)
