"""The house stays small: each folder of the product, and the tests, have a ceiling of lines, the docs one of words."""

import pytest

from tests.support.paths import ROOT

LINES = {
    "numerics": 10_647,
    "models": 5_295,
    "trainer": 8_275,
    "rollout": 7_709,
    "weight_sync": 1_316,
    "rl": 12_785,
    "diagnose": 3_826,
    "cli": 1_708,
    "tests": 40_847,
}
"""Lines of Python files, blank ones and comments too. `cli` is what lies in fp8rl/ beside the packages.

A ceiling may only fall. Whoever makes a folder smaller lowers its number. To raise one takes a commit of its own, whose
message has the reason.
"""
WORDS = 62_818
"""Words of the Markdown pages in docs/."""
SLACK = 100
"""Lines, or tens of words, by which a ceiling may be above what is there."""


def lines(folder: str) -> int:
    files = ROOT.glob("tests/**/*.py" if folder == "tests" else f"fp8rl/{folder}/**/*.py")
    if folder == "cli":
        files = (path for path in ROOT.glob("fp8rl/**/*.py") if path.relative_to(ROOT / "fp8rl").parts[0] not in LINES)
    return sum(path.read_text().count("\n") for path in files)


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_is_within_its_ceiling(folder: str) -> None:
    found, ceiling = lines(folder), LINES[folder]
    assert found <= ceiling, f"{folder}: found {found} lines, expected at most {ceiling}. Make room first"
    assert found >= ceiling - SLACK, f"{folder}: found {found} lines. Lower its ceiling of {ceiling}"


def test_the_docs_are_within_their_ceiling() -> None:
    found = sum(len(page.read_text().split()) for page in ROOT.glob("docs/*.md"))
    assert found <= WORDS, f"docs: found {found} words, expected at most {WORDS}. Make room first"
    assert found >= WORDS - 10 * SLACK, f"docs: found {found} words. Lower their ceiling of {WORDS}"
